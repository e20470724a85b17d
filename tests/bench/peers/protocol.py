"""How is an engine in an environment of its own asked for its times?

It reads a line for each round, and answers with a JSON object on one line of its standard output: the median seconds of
a step of decode of each batch, and those of a prompt. Nothing in this folder needs membound.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol


@dataclass(frozen=True)
class Asked:
    """The model's file or folder, and the sizes to time: sequences of `context` tokens, decoded for `steps` steps."""

    model: str
    threads: int
    context: int
    steps: int
    prompt: int
    batches: tuple[int, ...]


class Engine(Protocol):
    def decode(self, sequences: int) -> list[float]:
        """Seconds of each step of a batch."""

    def prompt(self) -> float:
        """Seconds from a prompt to its first token."""


def serve(engine_of: Callable[[Asked], Engine]) -> None:
    """Answers until nobody asks. What an engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, *numbers = sys.argv[1:]
    threads, context, steps, prompt, *batches = map(int, numbers)
    asked = Asked(model, threads, context, steps, prompt, tuple(batches))
    engine = engine_of(asked)
    for _ in sys.stdin:
        found = {str(batch): median(engine.decode(batch)) for batch in asked.batches}
        found["prompt"] = median(engine.prompt() for _ in range(3))
        print(json.dumps(found), file=answers, flush=True)


def seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
