"""How do cases run on a GPU so that one that dies, hangs or ruins the device stops no other, and all soon are done?

Processes take cases in turn, each with a CUDA context of its own: an illegal address ruins a context for good, and most
of a check's time is compiling, which several do at once. One that ends or takes too long is replaced for the next case.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Literal

Work = Literal["check", "bench"]
READY = "ready"
LIMIT_S = 150.0  # of a case, its compiling included
START_S = 180.0  # importing torch on a cold disk
GIB = 2**30
WORKER_BYTES = 14 * GIB  # at most, with the reference in fp32 of the largest case


def workers_for(cores: int, free_bytes: int) -> int:
    """How many work side by side on one GPU."""
    return max(1, min(8, cores, free_bytes // WORKER_BYTES))


def command_of(work: Work, device: str, seed: int) -> list[str]:
    """Of a worker; see `membound.kernels.bench.worker`."""
    return [sys.executable, "-m", "membound.kernels.bench.worker", work, device, str(seed)]


@dataclass(frozen=True)
class Answer:
    """What a worker said of case number `case`: a row, or the problem that kept it from saying anything."""

    case: int
    row: dict[str, Any] | None
    problem: str | None = None


@dataclass
class _Worker:
    """One process, which says that it is ready and then answers each number it is given with a line of JSON."""

    command: Sequence[str]
    _stderr: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> str | None:
        """Why it did not become ready, if so."""
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True
        )
        line = self._line(START_S)
        return None if line == READY else self._end(line is None, START_S)

    def ask(self, case: int, limit_s: float) -> Answer:
        process = self._process
        assert process is not None and process.stdin is not None, "it was started"
        with suppress(BrokenPipeError):  # it ended since its last answer; the line that is missing says so
            process.stdin.write(f"{case}\n")
            process.stdin.flush()
        line = self._line(limit_s)
        if not line:
            return Answer(case, None, self._end(line is None, limit_s))
        said = json.loads(line)
        if not said["goes_on"]:
            self.close()
        return Answer(case, said["row"])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Lets it end by itself, as the end of its input says; one that does not is killed."""
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _line(self, limit_s: float) -> str | None:
        """Its next line without the end, empty where there is none; None where it was killed for its time."""
        process, late = self._process, threading.Event()
        assert process is not None and process.stdout is not None

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        return None if late.is_set() else line.rstrip("\n")

    def _end(self, late: bool, limit_s: float) -> str:
        assert self._process is not None
        code = self._process.wait()
        if late:
            return f"took longer than {limit_s:g} s and was ended"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with code {code}" + (f": {said[-1]}" if said else "")


def answers(command: Sequence[str], cases: Sequence[int], workers: int, limit_s: float = LIMIT_S) -> Iterator[Answer]:
    """The answer to each of `cases`, as they come.

    A worker that does not start leaves its work to the others; raises RuntimeError with its reason where none does.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    found: queue.SimpleQueue[Answer | str | None] = queue.SimpleQueue()  # a reason of one that did not start; its end
    for case in cases:
        waiting.put(case)
    stopped = threading.Event()

    def work() -> None:
        worker = _Worker(command)
        try:
            while not stopped.is_set():
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    break
                if not worker.alive:
                    worker.close()
                    worker = _Worker(command)
                    if reason := worker.start():
                        waiting.put(case)
                        found.put(reason)
                        break
                found.put(worker.ask(case, limit_s))
        finally:
            worker.close()
            found.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, max(len(cases), 1)))]
    for thread in threads:
        thread.start()
    try:
        working, answered, reason = len(threads), 0, ""
        while working:
            one = found.get()
            if one is None:
                working -= 1
            elif isinstance(one, str):
                reason = one
            else:
                answered += 1
                yield one
        if reason and not answered:
            raise RuntimeError(f"no process to run the kernels starts: {reason}")
        while not waiting.empty():
            yield Answer(waiting.get(), None, reason)
    finally:
        stopped.set()
