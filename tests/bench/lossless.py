"""Do 200 prompts get the greedy tokens of the plain loop, however they are served?

    .venv/bin/python tests/bench/lossless.py [--prompts 200] [--tokens 16] [--only NAME ...] [--json FILE]

SmolLM2-135M-Instruct; the recorded prompts, and the same with parts of their recorded answers behind them, so that many
begin alike. Every row serves all of them in another way and counts those whose tokens are all equal; of the others it
says by how much the plain loop's token had the larger logit where they part, at most. The model's nine heads divide
among three processes, not two. Times mean nothing here, so the machine may be busy. Rows that FILE has
already are kept and not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.plain import generate_plain
from membound.runtime.ragged import Part, ragged_batch
from membound.simulator.scheduling.workload import requests_for
from membound.simulator.scheduling.workload.prompts import prompts_path

Changes = dict[str, Any]
BATCH = {"workload.arrivals.concurrency": 16}
DRAFTERS: dict[str, Changes] = {
    "n-gram drafts": {"name": "ngram_speculation", "gamma": 4},
    "draft model": {
        "name": "draft_model_speculation", "draft": "SmolLM2-135M", "weights": "pretrained", "format": "int4",
        "gamma": 3,
    },
    "first layers draft": {"name": "self_speculation", "layers": 24, "gamma": 2},
    "Medusa": {"name": "medusa", "heads": 3, "tree_size": 6, "guessable": 4096},
    "EAGLE": {"name": "eagle", "depth": 3, "tree_size": 6, "guessable": 4096},
}  # fmt: skip


def rows() -> dict[str, Changes]:
    """What each row changes in the scenario."""
    continuous: Changes = {"techniques": [{"name": "continuous_batching"}], **BATCH}
    ways: dict[str, Changes] = {
        "paged KV, one at a time": {"workload.arrivals.concurrency": 1, "engine.block_size": 8},
        "static batching": BATCH,
        "continuous batching": continuous,
        "chunked prefill": {**BATCH, "engine.batching": "chunked_prefill", "engine.max_batched_tokens": 48},
        "prefix cache": {**continuous, "engine.prefix_caching": True},
        "preemption, recompute": {**continuous, "engine.num_blocks": 60},
        "preemption, swap": {
            **continuous, "engine.num_blocks": 60, "engine.preemption": "swap", "engine.host_kv_gib": 1.0,
        },
        "prefill and decode in two processes": {
            **BATCH, "engine.batching": "continuous", "engine.disaggregation": {"link_bytes_per_s": 1e9},
        },
        "three processes, tp=3": {**continuous, "parallel.tp": 3},
        "three processes, tp=3, exact": {**continuous, "parallel": {"tp": 3, "exact": True}},
    }  # fmt: skip
    drafting = {
        name: {"techniques": [{"name": "continuous_batching"}, technique], **BATCH}
        for name, technique in DRAFTERS.items()
    }
    return ways | drafting


def written(count: int, tokens: int, folder: Path) -> Path:
    """A file of `count` distinct prompts."""
    recorded = [json.loads(line) for line in prompts_path("live").read_text("utf-8").splitlines()]

    def prompts() -> Iterator[str]:
        for known in range(0, 1000, 16):
            for item in recorded:
                said, left = item["output_ids"][:known], item["output_ids"][known:]
                if len(said) == known and len(left) >= tokens:
                    prompt = {**item, "id": f"{item['id']}-{known}", "output_ids": left}
                    yield json.dumps({**prompt, "prompt_ids": [*item["prompt_ids"], *said]})

    path = folder / "prompts.jsonl"
    chosen = [line for line, _ in zip(prompts(), range(count), strict=False)]
    assert len(chosen) == count, f"only {len(chosen)} prompts have {tokens} recorded tokens behind them"
    path.write_text("\n".join(chosen) + "\n", "utf-8")
    return path


def changed(scenario: Scenario, changes: Changes) -> Scenario:
    engine = {path.split(".")[1]: value for path, value in changes.items() if path.startswith("engine.")}
    scenario = scenario.with_value("engine", scenario.engine.model_dump(mode="json") | engine)
    for path, value in changes.items():
        if not path.startswith("engine."):
            scenario = scenario.with_value(path, value)
    return scenario


def gap(decoder: Decoder, prompt_ids: Sequence[int], plain: list[int], other: list[int]) -> float:
    """The difference of two logits where two outputs part: of the plain loop's token and of the other."""
    first = next(place for place, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    ids = [*prompt_ids, *plain[:first]]
    blocks = -(-len(ids) // 16)
    batch = ragged_batch([Part(0, len(ids), range(blocks))], 16)
    logits = decoder.forward(torch.tensor(ids), batch, decoder.new_cache(blocks, 16), torch.tensor([len(ids) - 1]))
    return float(logits[0, plain[first]] - logits[0, other[first]])


def kept(path: Path | None, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """The rows of an earlier run that asked the same."""
    if path is None or not path.exists():
        return []
    return [
        row
        for row in json.loads(path.read_text("utf-8"))["rows"]
        if row["prompts"] == prompts and row["tokens"] == tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=list(rows()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = written(options.prompts, options.tokens, Path(folder))
        scenario = changed(
            load_scenario("live-cpu").with_techniques(()),
            {
                "workload.prompts": {"kind": "text", "file": str(path)},
                "workload.requests": options.prompts,
                "workload.output_tokens": {"kind": "fixed", "tokens": options.tokens},
                "engine.max_num_seqs": 16,
            },
        )
        runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
        requests, decoder = requests_for(scenario), runtime.decoder(scenario)
        assert len({request.prompt_ids for request in requests}) == options.prompts
        plain = {r.id: list(generate_plain(decoder, r.prompt_ids or (), options.tokens)) for r in requests}
        found = kept(options.json, options.prompts, options.tokens)
        for name, changes in rows().items():
            if (options.only and name not in options.only) or name in {row["way"] for row in found}:
                continue
            result = runtime.run(changed(scenario, changes), get_hardware("H100-SXM5"))
            other = [r for r in requests if result.outputs[r.id] != plain[r.id]]
            equal, summary = len(plain) - len(other), result.summary
            gaps = [gap(decoder, r.prompt_ids or (), plain[r.id], result.outputs[r.id]) for r in other]
            found.append(
                {
                    "way": name, "equal": equal, "prompts": options.prompts, "tokens": options.tokens,
                    "largest_gap": max(gaps, default=0.0),
                    "preemptions": summary.preemptions, "acceptance_rate": summary.acceptance_rate,
                }
            )  # fmt: skip
            print(
                f"{name:38} {equal} of {options.prompts} equal (the others by {max(gaps, default=0.0):.3f} at most), "
                f"{summary.preemptions} preemptions",
                flush=True,
            )
            if options.json:
                created = datetime.now(UTC).isoformat(timespec="seconds")
                document = {"created": created, "model": "SmolLM2-135M-Instruct (Q4_1 GGUF, bf16)", "rows": found}
                options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        runtime.close()


if __name__ == "__main__":
    sys.exit(main())
