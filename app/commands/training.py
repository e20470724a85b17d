"""`membound train-draft`: heads that draft for a model, trained on what it writes itself, on this machine."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from membound.app.commands.terminal import JsonOption, SetOption, print_result, progress, scenario_of
from membound.roofline.errors import MemboundError

if TYPE_CHECKING:
    from membound.app.listener import Listener
    from membound.runtime.speculation.corpus import Text

TEXT_TOKENS = 160
WRITING_SHARE = 0.5  # of the time; the heads share the rest
KINDS = ("medusa", "eagle")


def train_draft(
    scenario: Annotated[
        str, typer.Option(help="whose model the heads draft for; its techniques are left out")
    ] = "live-cpu",
    kind: Annotated[str, typer.Option(help="medusa, eagle or both")] = "both",
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="time in all, writing the texts included")] = 55.0,
    texts: Annotated[int, typer.Option(min=48, max=1_000_000, help="texts that the model writes at most")] = 1728,
    folder: Annotated[
        Path | None, typer.Option(help="where texts, checkpoints and heads lie; a run goes on with what is there")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="threads; all cores if not given")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of prompts and of training")] = 1,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train Medusa heads and an EAGLE head for a model on text that it writes itself."""
    from membound.app.machine import need_torch

    if kind not in (*KINDS, "both"):
        raise MemboundError(f"option --kind is '{kind}'; give medusa, eagle or both")
    need_torch()
    kinds = KINDS if kind == "both" else (kind,)
    where = _folder(folder)
    with progress() as listener:
        done = _train(scenario, set_, kinds, minutes * 60, texts, where, threads, seed, listener)
    print_result(done, as_json, _lines)


def _folder(folder: Path | None) -> Path:
    from membound.roofline.home import home_folder

    where = folder or home_folder() / "drafts"
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemboundError(f"option --folder is '{where}', which cannot be written: {error.strerror}") from None
    return where


def _train(
    name: str,
    assignments: list[str] | None,
    kinds: tuple[str, ...],
    seconds: float,
    most_texts: int,
    folder: Path,
    threads: int | None,
    seed: int,
    listener: Listener,
) -> dict[str, Any]:
    from membound.runtime.engine import Runtime
    from membound.runtime.speculation.corpus import SHARD, Corpus
    from membound.runtime.speculation.training import TrainingPlan, train

    chosen = scenario_of(name, assignments).with_techniques(())
    listener.progress(0.0, f"loading {chosen.model}")
    runtime = Runtime(threads=threads)
    loaded = runtime.model(chosen)
    if loaded.tokenizer is None:
        raise MemboundError(
            f"model '{chosen.model}' with weights '{chosen.weights}' has no tokenizer, and writes nothing "
            "to learn from; give weights that were trained, and their tokenizer"
        )
    start_s = time.monotonic()
    corpus = Corpus(folder / "texts", TEXT_TOKENS, seed)
    corpus.write(
        runtime.decoder(chosen),
        loaded.tokenizer,
        -(-most_texts // SHARD),
        lambda done, of: listener.progress(WRITING_SHARE * done / of, f"the model writes: shard {done} of {of}"),
        lambda: time.monotonic() - start_s > WRITING_SHARE * seconds,
    )
    written: list[Text] = list(corpus.texts())
    each_s = max(1.0, (seconds - (time.monotonic() - start_s)) / len(kinds))
    heads: dict[str, Any] = {}
    for index, kind in enumerate(kinds):

        def show(fraction: float, message: str, index: int = index) -> None:
            listener.progress(WRITING_SHARE + (1 - WRITING_SHARE) * (index + fraction) / len(kinds), message)

        plan = TrainingPlan(kind, each_s, folder, seed)
        head = train(plan, loaded.spec, loaded.weights, written, show)
        log = folder / f"{kind}.log.jsonl"
        about = {
            "model": loaded.spec.name,
            "weights": loaded.weights.origin,
            "command": " ".join(["membound", *sys.argv[1:]]),
            "trained": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "texts": str(len(written)),
            "tokens": str(sum(len(text.token_ids) - text.prompt_tokens for text in written)),
            "last_epoch": log.read_text("utf-8").splitlines()[-1],
        }
        path = folder / f"{loaded.spec.name.lower()}-{kind}.safetensors"
        type(head)(head.kind, head.tensors, about).save(path)
        heads[kind] = {"file": str(path), "log": str(log), **json.loads(about["last_epoch"])}
    return {"model": loaded.spec.name, "texts": len(written), "heads": heads}


def _lines(document: dict[str, Any]) -> str:
    lines = [f"{document['model']}: {document['texts']} texts"]
    for kind, head in document["heads"].items():
        shares = ", ".join(f"{share:.0%}" for share in head["agreement_by_position"])
        lines.append(f"{kind}: best guess right at positions 1, 2 ..: {shares}; {head['file']}")
    return "\n".join(lines)
