"""What does a scenario come to when one process computes prompts and another writes outputs?

The second is this one. The requests go to whoever computes prompts; what comes back is a sequence whose K and V lie in
shared memory, which the scheduler admits as one that was swapped out, and the executor fills its blocks.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from membound.kernels.dispatch import rounding
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario
from membound.runtime.clock import WallClock
from membound.runtime.disaggregated.handover import ENGINES, Handover, Rejection, handover_folder, say, take
from membound.runtime.kv.block_moves import BlockMover
from membound.runtime.orphans import ended
from membound.simulator.scheduling.blocks import BlockTables, HostName
from membound.simulator.scheduling.client import Client, client_for
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.recorder import Observer, Recorder
from membound.simulator.scheduling.request import Request, Sequence
from membound.simulator.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from membound.runtime.assembly import Assembly
    from membound.runtime.engine import Runtime

POLL_S = 0.05
GONE = ""  # what the reader puts when the other process has closed its output


class PrefillProcess:
    """The process that computes prompts, and the lines that it says."""

    def __init__(self, scenario: Path, folder: Path, runtime: Runtime, threads: int, hardware: str) -> None:
        device, rounds = runtime.device, rounding(runtime.kernels)
        command = [sys.executable, "-m", "membound.runtime.disaggregated.prefill", str(scenario), str(folder), device]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, str(threads), hardware, str(os.getpid()), rounds],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._last_words: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(GONE)

    def _listen(self) -> None:
        assert self.process.stderr is not None, "it is a pipe"
        for line in self.process.stderr:
            self._last_words = [line.strip()]

    def say(self, line: str) -> None:
        """Raises MemboundError where the process is gone."""
        assert self.process.stdin is not None, "it is a pipe"
        try:
            say(self.process.stdin, line)
        except (BrokenPipeError, ValueError):
            raise self.gone() from None

    def answer(self, line: str) -> dict[str, Any]:
        """What a line says; raises MemboundError for the line of a process that is gone."""
        if line == GONE:
            raise self.gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def gone(self) -> MemboundError:
        """What it said last."""
        code = self.process.wait()
        last = self._last_words[0] if self._last_words else "it said nothing"
        return MemboundError(f"the process that computes prompts {ended(code)}: {last}")

    def close_requests(self) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.close()

    def end(self) -> None:
        """Kills it if it is still there."""
        self.process.kill()
        self.process.wait()


class Router:
    """Sends the users' requests to the prefill process, and hands what comes back to the engine that decodes.

    A thread of its own sends each request when its user does, whatever the engine is doing.
    """

    def __init__(
        self,
        users: Client,
        prefill: PrefillProcess,
        clock: WallClock,
        scheduler: Scheduler,
        recorder: Recorder,
        mover: BlockMover,
    ) -> None:
        self.users = users
        self.prefill = prefill
        self.clock = clock
        self.scheduler = scheduler
        self.recorder = recorder
        self.mover = mover
        self.moved_bytes = 0
        self.requests: dict[int, Request] = {}
        self._heard: deque[str] = deque()
        self._news = threading.Condition()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._failure: MemboundError | None = None

    def start(self) -> None:
        self._sender.start()

    def due(self, now_s: float) -> list[Request | Sequence]:
        """Sequences whose prompts were computed, with K and V where the mover finds them."""
        with suppress(queue.Empty):
            while True:
                self._heard.append(self.prefill.lines.get_nowait())
        arrived: list[Request | Sequence] = []
        while self._heard:
            said = self.prefill.answer(self._heard.popleft())
            if "rejection" in said:
                self._reject(Rejection(**said["rejection"]), now_s)
                continue
            sequence = self._continued(Handover.of(said["handover"]))
            if sequence.finished:
                self.recorder.completed(sequence)
                sequence.status = "completed"
                self.ended(sequence, now_s)
            else:
                arrived.append(sequence)
        if self._failure is not None:
            raise self._failure
        return arrived

    def next_arrival_s(self) -> float | None:
        with self._news:
            idle = not self.requests and self.users.next_arrival_s() is None
            return None if idle else math.inf

    def ended(self, sequence: Sequence, now_s: float) -> None:
        for name in self._host_names(sequence):  # nobody fetched them where it ended before it was admitted here
            self.mover.host.pop(name, None)
        with self._news:
            del self.requests[sequence.id]
            self.users.ended(sequence, now_s)
            self._news.notify()

    def wait(self) -> None:
        """Returns when the other process has said something, or after a moment."""
        with suppress(queue.Empty):
            self._heard.append(self.prefill.lines.get(timeout=POLL_S))

    def _continued(self, handover: Handover) -> Sequence:
        request = self.requests[handover.request]
        assert request.prompt_ids is not None, "the runtime knows the tokens"
        sequence = Sequence.continued(request, [*request.prompt_ids, handover.first_token])
        sequence.preemptions = handover.preemptions
        sequence.cached_tokens = handover.cached_tokens
        sequence.admitted_s = handover.admitted_s
        sequence.first_token_s = sequence.last_token_s = handover.first_token_s
        self.moved_bytes += handover.nbytes
        self.mover.host |= zip(self._host_names(sequence), take(handover), strict=True)
        return sequence

    def _host_names(self, sequence: Sequence) -> list[HostName]:
        """What the mover calls the blocks that are handed over."""
        blocks = -(-sequence.request.prompt_tokens // self.scheduler.pool.block_size)
        return [BlockTables.swapped(sequence, index) for index in range(blocks)]

    def _reject(self, rejection: Rejection, now_s: float) -> None:
        """The other engine turned a request away."""
        sequence = Sequence.of(self.requests[rejection.request])
        sequence.status, sequence.reason = "rejected", rejection.reason
        self.recorder.rejected(sequence)
        self.ended(sequence, now_s)

    def _send(self) -> None:
        try:
            with self._news:
                while True:
                    for request in self.users.due(self.clock.now_s()):
                        assert isinstance(request, Request), "users send requests"
                        self._send_one(request)
                    at_s = self.users.next_arrival_s()
                    if at_s is None and not self.requests:
                        return
                    self._news.wait(None if at_s is None else max(0.0, at_s - self.clock.now_s()))
        except MemboundError as error:
            self._failure = error

    def _send_one(self, request: Request) -> None:
        if (reason := self.scheduler.refusal(request)) is not None:
            sequence = Sequence.of(request)
            sequence.status, sequence.reason = "rejected", reason
            self.recorder.rejected(sequence)
            self.users.ended(sequence, self.clock.now_s())
            return
        self.requests[request.id] = request
        asked = {"id": request.id, "arrival_s": request.arrival_s, "prompt_ids": request.prompt_ids}
        self.prefill.say(json.dumps(asked))


def run_disaggregated(
    runtime: Runtime, scenario: Scenario, hardware: HardwareSpec, observer: Observer | None
) -> RunResult:
    """Serves a scenario's workload with a process for prompts beside this one, which writes the outputs.

    Each has half of the threads and of the memory, and its own copy of the weights. What they cannot do `refusals` has
    turned away. Raises MemboundError where the other process ends.
    """
    settings = scenario.engine.disaggregation
    assert settings is not None, "the scenario has two pools"
    whole = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"disaggregation": None})})
    threads = torch.get_num_threads()
    share = max(1, threads // ENGINES)
    with handover_folder() as name:
        folder = Path(name)
        written = folder / "scenario.yaml"
        written.write_text(whole.to_yaml(), encoding="utf-8")
        prefill = PrefillProcess(written, folder, runtime, share, hardware.name)
        torch.set_num_threads(share)
        try:
            recorder = Recorder(observer)
            assembly = runtime.assemble(whole, clock := WallClock(), hardware, recorder, moves=True, engines=ENGINES)
            router = _serve(assembly, prefill, clock)
            recorded = folder / prefill.answer(prefill.lines.get())["recorded"]
            with np.load(recorded, allow_pickle=False) as arrays:
                prompts = Recorder.from_arrays(dict(arrays), assembly.recorder.bounds)
        finally:
            torch.set_num_threads(threads)
            prefill.end()
    moved = f"{router.moved_bytes / 1e6:.1f} MB of K and V moved through shared memory"
    note = f"prompts in a process of its own, {share} of {threads} threads each, as whole prompts; {moved}"
    return assembly.result(
        scenario, Recorder.joined([assembly.recorder, prompts]), [note], settings.devices(scenario.parallel)
    )


def _serve(assembly: Assembly, prefill: PrefillProcess, clock: WallClock) -> Router:
    """Serves everybody; on return both engines are empty."""
    assert assembly.mover is not None and assembly.times is not None, "blocks come from elsewhere"
    users = client_for(assembly.scenario.workload.arrivals, assembly.requests)
    router = Router(users, prefill, clock, assembly.scheduler, assembly.recorder, assembly.mover)
    prefill.answer(prefill.lines.get())  # it is ready
    clock.begin()
    assembly.begin()
    prefill.say(repr(clock.began))
    router.start()
    with assembly.counted():
        for until_s in serve(assembly.scheduler, router, assembly.executor, clock, assembly.recorder):
            if until_s == math.inf:
                router.wait()
    prefill.close_requests()
    assembly.scheduler.check_integrity()
    return router
