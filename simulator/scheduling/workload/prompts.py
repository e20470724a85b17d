"""Which prompts were recorded, with what a model wrote after them?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from membound.roofline.errors import MemboundError


@dataclass(frozen=True)
class Prompt:
    """A prompt as recorded by `membound record`: its tokens and a model's greedy continuation."""

    id: str
    task: str
    text: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def prompts_path(file: str) -> Path:
    """The recorded prompts `file` names: a path, or a name in `data/prompts/`."""
    if file.endswith(".jsonl"):
        return Path(file)
    return Path(str(resources.files("membound.data"))) / "prompts" / f"{file}.jsonl"


def load_prompts(file: str) -> list[Prompt]:
    """Reads recorded prompts; raises MemboundError with one sentence."""
    path = prompts_path(file)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MemboundError(
            f"workload.prompts.file '{file}' cannot be read ({path}: {reason}); "
            "give a name of data/prompts/ or the path of a .jsonl that `membound record` wrote"
        ) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            ids, outputs = tuple(map(int, item["prompt_ids"])), tuple(map(int, item["output_ids"]))
            prompts.append(Prompt(str(item["id"]), str(item["task"]), str(item["text"]), ids, outputs))
        except (ValueError, KeyError, TypeError):
            raise MemboundError(
                f"workload.prompts.file '{file}' line {number} is not a recorded prompt; make it with `membound record`"
            ) from None
    if not prompts:
        raise MemboundError(f"workload.prompts.file '{file}' holds no prompt")
    return prompts
