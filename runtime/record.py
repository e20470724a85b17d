"""What does a model write after each prompt? The content that the simulator replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.progress import Progress, silent
from membound.roofline.reading.files import reason, write_files
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import Scenario
from membound.runtime.engine import Runtime
from membound.runtime.plain import generate_plain


def read_texts(path: Path) -> list[dict[str, str]]:
    """The prompts of a YAML file: a list `prompts` of `id`, `task` and `text`; raises MemboundError otherwise."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MemboundError(f"prompts file '{path}' cannot be read: {reason(error)}") from None
    document = parse_yaml(text, f"prompts file '{path}'")
    listed: Any = document.get("prompts") if isinstance(document, dict) else None
    needed = {"id", "task", "text"}
    if not isinstance(listed, list) or not all(isinstance(item, dict) and needed <= item.keys() for item in listed):
        raise MemboundError(f"prompts file '{path}' must have a list 'prompts' of id, task and text")
    return [{key: str(item[key]) for key in needed} for item in listed]


def record(
    texts: Path,
    output: Path,
    runtime: Runtime,
    scenario: Scenario,
    max_tokens: int,
    progress: Progress = silent,
) -> int:
    """Writes each prompt of `texts` with its token ids and `max_tokens` greedy tokens to `output` (JSON lines).

    The scenario names the model. Tokens go on behind an end token, as they do in a benchmark that ignores it.
    Returns the number of prompts; raises MemboundError where the model has no tokenizer.
    """
    loaded, decoder = runtime.model(scenario), runtime.decoder(scenario)
    if loaded.tokenizer is None:
        raise MemboundError(
            f"model '{scenario.model}' with weights '{scenario.weights}' has no tokenizer to record with"
        )
    prompts = read_texts(texts)
    lines = []
    for done, prompt in enumerate(prompts):
        progress(done / len(prompts), prompt["id"])
        prompt_ids = loaded.tokenizer.chat(prompt["text"])
        output_ids = list(generate_plain(decoder, prompt_ids, max_tokens))
        item = {"id": prompt["id"], "task": prompt["task"], "text": prompt["text"]}
        lines.append(json.dumps(item | {"prompt_ids": prompt_ids, "output_ids": output_ids}, ensure_ascii=False))
    try:
        write_files({output: ("\n".join(lines) + "\n").encode()})
    except OSError as error:
        raise MemboundError(f"'{output}' cannot be written: {reason(error)}") from None
    return len(prompts)
