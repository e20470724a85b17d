"""Which blocks of earlier requests hold the same tokens as a new one's?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from membound.simulator.scheduling.block_runs import BlockRuns
from membound.simulator.scheduling.prefix import BlockName, Span, blocks_of


class Keeper(Protocol):
    """Keeps the content of the cache's blocks, where there is any."""

    def evicted(self, name: BlockName, to_host: bool) -> None:
        """A block on the device is given up; its content goes to the host or is lost."""

    def forgotten(self, name: BlockName) -> None:
        """A block on the host is given up."""


class PrefixCache:
    """Blocks by what all tokens up to their end are, each with the number of sequences that use it.

    A block that nobody uses stays until its memory is needed: the one that was used longest ago goes first, and of a
    sequence its last block, so that what is left can still be found. Where the host has room for `host_blocks`, blocks
    go there first and are lost only from there. Source: the block hashes of vLLM and the LRU of SGLang's RadixAttention
    (Zheng et al., NeurIPS 2024), which keep the same blocks.

    Blocks are named by spans, and kept as runs of neighbours that are used alike, so that a prompt costs as much as it
    has parts, however long they are.
    """

    def __init__(self, host_blocks: int = 0) -> None:
        self.host_blocks = host_blocks
        self.keeper: Keeper | None = None
        self.unused = 0  # blocks that nobody uses, whose memory can be had
        self.used = 0  # blocks that somebody uses
        self._device = BlockRuns()
        self._host = BlockRuns()
        self._on_host = 0
        self.evicted = 0
        self.repeated = 0  # uses of blocks beyond the first of each

    def has(self, name: BlockName) -> bool:
        """Whether a block exists on the device."""
        return self._device.has(*name)

    def found(self, spans: Sequence[Span]) -> tuple[int, int, int]:
        """How many leading blocks exist on the device, how many of them nobody uses, how many follow on the host.

        Host blocks are looked for only behind those of the device.
        """
        here = idle = there = 0
        on_host = False
        for id, first, end in spans:
            at = first
            if not on_host:
                held, unused = self._device.leading(Span(id, first, end))
                here, idle, at = here + held, idle + unused, first + held
                on_host = at < end
            if on_host:
                if not self._on_host:
                    break
                kept, _ = self._host.leading(Span(id, at, end))
                there += kept
                if at + kept < end:
                    break
        return here, idle, there

    def use(self, spans: Sequence[Span]) -> None:
        """One more sequence uses blocks that exist on the device."""
        for span in spans:
            for run in self._device.within(span):
                if run.users:
                    self.repeated += len(run)
                else:
                    self._device.dequeue(run)
                    self.unused -= len(run)
                    self.used += len(run)
                run.users += 1
            self._device.join_used(span.id)

    def add(self, spans: Sequence[Span]) -> list[Span]:
        """Blocks in use become ones of the cache, with one user, but those of which it has one like it.

        Returns the added.
        """
        added = []
        for span in spans:
            for gap in self._device.gaps(span):
                self._device.insert(gap, 1)
                self.used += gap.end - gap.first
                added.append(gap)
                if self._on_host:
                    for run in self._host.within(gap):
                        self._on_host -= len(run)
                        self._host.remove(run)
            self._device.join_used(span.id)
        return added

    def leave(self, spans: Sequence[Span]) -> None:
        """A sequence no longer uses its blocks; the last of them will be evicted first."""
        for span in reversed(spans):
            for run in reversed(self._device.within(span)):
                run.users -= 1
                if run.users:
                    self.repeated -= len(run)
                else:
                    self.unused += len(run)
                    self.used -= len(run)
                    self._device.enqueue(run)
            self._device.join_used(span.id)

    def evict(self, blocks: int) -> int:
        """Gives up `blocks` blocks that nobody uses, those of longest ago first, and returns how many."""
        left = blocks
        while left:
            given = self._device.pop(left)
            left -= given.end - given.first
            if self.keeper is not None:
                for name in reversed(blocks_of([given])):
                    self.keeper.evicted(name, to_host=self.host_blocks > 0)
            if self.host_blocks:
                self._host.insert(given, 0)
                self._on_host += given.end - given.first
                self._lose()
        self.unused -= blocks
        self.evicted += blocks
        return blocks

    def _lose(self) -> None:
        """Gives up what the host has no room for."""
        while (beyond := self._on_host - self.host_blocks) > 0:
            lost = self._host.pop(beyond)
            self._on_host -= lost.end - lost.first
            if self.keeper is not None:
                for name in reversed(blocks_of([lost])):
                    self.keeper.forgotten(name)

    def check_integrity(self, sequences: Sequence[Sequence[Span]]) -> None:
        """Asserts that users are counted rightly, given the blocks that each sequence uses."""
        held = {name: run.users for run in self._device for name in blocks_of([Span(run.id, run.first, run.end)])}
        users = dict.fromkeys(held, 0)
        for spans in sequences:
            for name in blocks_of(spans):
                users[name] += 1
        assert users == held, "a block's users are miscounted"
        assert self.repeated == sum(count - 1 for count in users.values() if count), "repeated uses are miscounted"
        assert self.unused == sum(not count for count in users.values()), "unused blocks are miscounted"
        assert self.used == len(users) - self.unused, "used blocks are miscounted"
        assert self.unused == sum(map(len, self._device.queue)), "an unused block is not in the queue"
        on_host = {name for run in self._host for name in blocks_of([Span(run.id, run.first, run.end)])}
        assert len(on_host) == self._on_host <= max(self.host_blocks, 0), "blocks on the host are miscounted"
        assert not on_host & set(users), "a block is on the host and on the device"
