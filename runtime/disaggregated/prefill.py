"""What does a process do that computes prompts for another that writes the outputs?

`run.run_disaggregated` starts it with a scenario's file, the folder for what it hands over, a device, a number of
threads, the hardware's name and its own number. It reads requests from standard input, a line of JSON each, and says
on standard output what became of them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from membound.kernels.dispatch import alike
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import load_scenario
from membound.runtime.clock import WallClock
from membound.runtime.decoder import KvCache
from membound.runtime.disaggregated.handover import ENGINES, Handover, Rejection, put, say
from membound.runtime.engine import Runtime
from membound.runtime.orphans import end_with
from membound.simulator.scheduling.loop import Executor, serve
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Outcome, Request, Sequence, Step


class Lines:
    """The requests that come in, as the client of this engine; what ends is said on `answers`."""

    def __init__(self, requests: IO[str], answers: IO[str], contents: dict[int, list[Tensor]], folder: Path) -> None:
        self.answers = answers
        self.contents = contents
        self.folder = folder
        self._arrived: deque[Request] = deque()
        self._closed = False
        self._news = threading.Condition()
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()

    def _read(self, requests: IO[str]) -> None:
        for line in requests:
            fields = json.loads(line)
            prompt = tuple(fields["prompt_ids"])
            request = Request(fields["id"], fields["arrival_s"], len(prompt), 1, prompt)
            with self._news:
                self._arrived.append(request)
                self._news.notify()
        with self._news:
            self._closed = True
            self._news.notify()

    def wait(self) -> None:
        """Returns when a request has arrived, or none will."""
        with self._news:
            self._news.wait_for(lambda: self._arrived or self._closed)

    def due(self, now_s: float) -> list[Request]:
        with self._news:
            arrived = list(self._arrived)
            self._arrived.clear()
        return arrived

    def next_arrival_s(self) -> float | None:
        with self._news:
            return None if self._closed and not self._arrived else math.inf

    def ended(self, sequence: Sequence, now_s: float) -> None:
        if sequence.status == "rejected":
            say(self.answers, Rejection(sequence.id, sequence.reason or "").to_line())
            return
        layers = self.contents.pop(sequence.id, [])
        assert sequence.token_ids is not None and sequence.first_token_s is not None, "a prompt has a first token"
        assert sequence.admitted_s is not None, "what ended has begun"
        file = self.folder / str(sequence.id)
        if layers:
            put(file, layers)
        handover = Handover(
            sequence.id,
            sequence.token_ids[-1],
            sequence.admitted_s,
            sequence.first_token_s,
            sequence.preemptions,
            sequence.cached_tokens,
            layers[0].shape[0] if layers else 0,
            tuple(layer.shape[1] for layer in layers),
            str(file),
        )
        say(self.answers, handover.to_line())


class KeepsPrompts:
    """Runs steps on `inner`, and keeps what the layers hold of every prompt that ends, before its blocks are free."""

    def __init__(self, inner: Executor, kv: KvCache, contents: dict[int, list[Tensor]], block_size: int) -> None:
        self.inner = inner
        self.kv = kv
        self.contents = contents
        self.block_size = block_size

    def run(self, step: Step, sequences: dict[int, Sequence]) -> Outcome:
        outcome = self.inner.run(step, sequences)
        for work in step.work:
            if work.emits:
                blocks = sequences[work.sequence].blocks[: -(-work.context // self.block_size)]
                self.contents[work.sequence] = [layer.read_blocks(blocks) for layer in self.kv]  # type: ignore[attr-defined]
        return outcome


class PromptRecorder(Recorder):
    """Records steps; the requests are recorded where they end."""

    def completed(self, sequence: Sequence) -> None:
        self._left(sequence)

    def rejected(self, sequence: Sequence) -> None:
        """Nothing was computed."""


def main(scenario: str, folder: str, device: str, threads: str, hardware: str, parent: str, rounds: str) -> None:
    """Computes prompts until standard input ends."""
    end_with(int(parent), Path(folder))
    torch.set_num_threads(int(threads))
    answers, sys.stdout = sys.stdout, sys.stderr
    read = load_scenario(scenario)
    runtime = Runtime(device, kernels=alike(device, rounds))
    recorder = PromptRecorder()
    assembly = runtime.assemble(read, clock := WallClock(), get_hardware(hardware), recorder, engines=ENGINES)
    recorder.bounds = None  # those who read the records work them out
    say(answers, json.dumps({"ready": True}))
    began = float(sys.stdin.readline())
    clock.begin(began)
    contents: dict[int, list[Tensor]] = {}
    client = Lines(sys.stdin, answers, contents, Path(folder))
    executor = KeepsPrompts(assembly.executor, assembly.kv, contents, read.engine.block_size)
    for until_s in serve(assembly.scheduler, client, executor, clock, recorder):
        if until_s == math.inf:
            client.wait()
    assembly.scheduler.check_integrity()
    np.savez(Path(folder) / "recorded.npz", allow_pickle=False, **recorder.to_arrays())
    say(answers, json.dumps({"recorded": "recorded.npz"}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BrokenPipeError:
        # Whoever asked removes what is handed over, unless it was killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        sys.exit("nobody listens any more")
    except MemboundError as error:
        sys.exit(str(error))
