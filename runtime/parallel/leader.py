"""How is a model that several processes hold used as if it were one decoder?"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from membound.kernels.base import Kernels, RaggedBatch
from membound.kernels.dispatch import rounding
from membound.roofline.errors import MemboundError
from membound.roofline.models import ModelSpec
from membound.roofline.scenario import Scenario
from membound.runtime.blocks.base import LayerCache
from membound.runtime.cuda_graphs import DecodeGraphs
from membound.runtime.decoder import Decoder, KvCache
from membound.runtime.orphans import ended
from membound.runtime.parallel.graphs import captured, part_of_step
from membound.runtime.parallel.group import MEETING_S, TIMEOUT_S, Group, GroupError, ready_file
from membound.runtime.parallel.steps import Command, Message, send

STOP_S = 10.0
POLL_S = 0.02
GONE_S = 2.0  # a connection breaks before the process that held it is seen to be gone


class DividedCache(list[LayerCache]):
    """The leader's part of a cache that every process has a part of, under a number that they share."""

    def __init__(self, parts: KvCache, number: int) -> None:
        super().__init__(parts)
        self.number = number


class DividedDecoder:
    """The leader's decoder: each call is told to the followers before its own part is computed.

    `spec` is the whole model's, `part` what this process holds of it; `in_step` stays true where a step broke off, so
    that the followers wait for sums and not for what is next. Raises GroupError where a follower has ended.
    """

    def __init__(self, spec: ModelSpec, part: Decoder, group: Group, followers: Followers) -> None:
        self.spec = spec
        self.part = part
        self.group = group
        self.followers = followers
        self.kernels = part.kernels
        self.device = part.device
        self.in_step = False
        self._caches = 0
        self._dropped: list[int] = []
        self._graphs: dict[int, DecodeGraphs] = {}

    @property
    def usable(self) -> bool:
        """Whether the next step finds all followers, and finds them waiting for it."""
        return self.followers.alive and not self.in_step

    @property
    def weight_bytes(self) -> int:
        """Bytes that one step reads on each device."""
        return self.part.weight_bytes

    @property
    def emulated(self) -> bool:
        """As of `Decoder`."""
        return self.part.emulated

    def new_cache(self, num_blocks: int, block_size: int, seats: int = 1) -> KvCache:
        self._caches += 1
        self._tell(Message(Command.NEW_CACHE, self._caches, (num_blocks, block_size, seats)))
        cache = DividedCache(self.part.new_cache(num_blocks, block_size, seats), self._caches)
        # Told with the next message: this may happen in the middle of one.
        weakref.finalize(cache, self._dropped.append, self._caches)
        weakref.finalize(cache, self._graphs.pop, self._caches, None)
        return cache

    def capture(self, cache: KvCache, max_blocks: int, max_num_seqs: int, guesses: int) -> str | None:
        """Captures the decode steps over `cache` in every process, as `decode_graphs`: in words what was done."""
        assert isinstance(cache, DividedCache), "made by new_cache"
        if self.device.type != "cuda":
            return None
        self.in_step = True
        self._tell(Message(Command.CAPTURE, cache.number, (max_blocks, max_num_seqs, guesses)))
        with self._explained():
            graphs, note = captured(self.part, self.group, cache, max_blocks, max_num_seqs, guesses)
        self.in_step = False
        if graphs is not None:
            self._graphs[cache.number] = graphs
        return note

    def forget_graphs(self) -> None:
        """Before the group ends: NCCL's communicators wait for the graphs that captured them to go first."""
        self._graphs.clear()

    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: KvCache, logits_rows: Tensor) -> Tensor:
        """As of `Decoder`; what lies on the host is told from there, without waiting for a device that it went to."""
        assert isinstance(cache, DividedCache), "made by new_cache"
        self.in_step = True
        self._tell(Message(Command.FORWARD, cache.number, (0, 0, 0), token_ids, batch, logits_rows))
        with self._explained():
            logits = part_of_step(self.part, self._graphs.get(cache.number), token_ids, batch, cache, logits_rows)
        self.in_step = False
        return logits

    def _tell(self, message: Message) -> None:
        if (reason := self.followers.reason()) is not None:
            raise reason
        with self._explained():
            while self._dropped:
                send(self.group, Message(Command.DROP_CACHE, self._dropped.pop()))
            send(self.group, message)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what a follower that ended said, rather than that a connection broke."""
        try:
            yield
        except GroupError as error:
            raise self.followers.reason(GONE_S) or error from None


class Followers:
    """The other processes of a model, from rank 1 on, and what becomes of them."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self._last_words: dict[int, str] = {}

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def reason(self, patience_s: float = 0.0) -> GroupError | None:
        """What a follower that has ended said last; None while all are there, and still are after `patience_s`."""
        until_s = time.monotonic() + patience_s
        while (reason := self._reason()) is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return reason

    def _reason(self) -> GroupError | None:
        for rank, process in enumerate(self.processes, 1):
            if (code := process.poll()) is not None:
                if rank not in self._last_words:
                    assert process.stderr is not None, "it is a pipe"
                    said = process.stderr.read().strip().splitlines()
                    self._last_words[rank] = said[-1] if said else "it said nothing"
                return GroupError(f"process {rank} of the divided model {ended(code)}: {self._last_words[rank]}")
        return None

    def wait_until_ready(self, meeting: Path) -> None:
        """Returns when all have read their weights; raises GroupError where one ends or takes too long."""
        begun_s = time.monotonic()
        while not all(ready_file(meeting, rank).exists() for rank in range(1, len(self.processes) + 1)):
            if (reason := self.reason()) is not None:
                raise reason
            if time.monotonic() - begun_s > TIMEOUT_S:
                raise GroupError(f"the processes of the divided model were not ready after {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Waits a moment for those that were told to stop, and ends the others."""
        for process in self.processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()


@contextmanager
def divided(
    scenario: Scenario, spec: ModelSpec, device: str, kernels: Kernels, build: Callable[[Group], Decoder]
) -> Iterator[DividedDecoder]:
    """The scenario's model, of shape `spec`, on `parallel.tp` processes, this one included; they end with the context.

    `build` makes one process's part, here as in the followers, whose kernels round as `kernels` do. The threads of this
    process are divided among them. Raises MemboundError where there are fewer GPUs than processes, GroupError where a
    follower does not come up.
    """
    tp = scenario.setup.parallel.tp
    if device.startswith("cuda") and torch.cuda.device_count() < tp:
        raise MemboundError(f"parallel.tp is {tp}, but this machine has {torch.cuda.device_count()} GPUs; give fewer")
    threads = torch.get_num_threads()
    share = max(1, threads // tp)
    with tempfile.TemporaryDirectory(prefix="membound-parallel-") as folder:
        meeting, written = Path(folder) / "meeting", Path(folder) / "scenario.yaml"
        written.write_text(scenario.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "membound.runtime.parallel.follower", str(written), str(meeting)]
        followers = Followers(
            [
                _started([*command, str(rank), device, str(share), str(os.getpid()), rounding(kernels)])
                for rank in range(1, tp)
            ]
        )
        torch.set_num_threads(share)
        group: Group | None = None
        decoder: DividedDecoder | None = None
        try:
            followers.wait_until_ready(meeting)
            group = Group(meeting, 0, tp, device, MEETING_S)
            decoder = DividedDecoder(spec, build(group), group, followers)
            yield decoder
        except GroupError as error:
            raise followers.reason(GONE_S) or error from None
        finally:
            torch.set_num_threads(threads)
            if decoder is not None:
                decoder.forget_graphs()
            if group is not None and followers.alive and (decoder is None or decoder.usable):
                with suppress(GroupError):  # who has heard it may be gone before it is told to its end
                    send(group, Message(Command.STOP))
            else:
                for process in followers.processes:
                    process.kill()
            followers.end()


def _started(command: list[str]) -> subprocess.Popen[str]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True)
