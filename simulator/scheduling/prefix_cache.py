"""Which blocks of earlier requests hold the same tokens as a new one's?"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Keeper(Protocol):
    """Keeps the content of the cache's blocks, where there is any."""

    def evicted(self, name: int, to_host: bool) -> None:
        """A block on the device is given up; its content goes to the host or is lost."""

    def forgotten(self, name: int) -> None:
        """A block on the host is given up."""


class PrefixCache:
    """Blocks by the hash of all tokens up to their end, each with the number of sequences that use it.

    A block that nobody uses stays until its memory is needed: the one that was used longest ago goes first, and of a
    sequence its last block, so that what is left can still be found. Where the host has room for `host_blocks`, blocks
    go there first and are lost only from there. Source: the block hashes of vLLM and the LRU of SGLang's RadixAttention
    (Zheng et al., NeurIPS 2024), which keep the same blocks.
    """

    def __init__(self, host_blocks: int = 0) -> None:
        self.host_blocks = host_blocks
        self.keeper: Keeper | None = None
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self.evicted = 0
        self.repeated = 0  # uses of blocks beyond the first of each

    @property
    def unused(self) -> int:
        """Blocks that nobody uses, whose memory can be had."""
        return len(self._unused)

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return len(self._users) - len(self._unused)

    def has(self, name: int) -> bool:
        """Whether a block exists on the device."""
        return name in self._users

    def found(self, hashes: list[int]) -> tuple[int, int, int]:
        """How many leading blocks exist on the device, how many of them nobody uses, how many follow on the host.

        Host blocks are looked for only behind those of the device.
        """
        users, unused = self._users, self._unused
        here = idle = 0
        for name in hashes:
            if name not in users:
                break
            here += 1
            idle += name in unused
        there = 0
        if self._host:
            for name in hashes[here:]:
                if name not in self._host:
                    break
                there += 1
        return here, idle, there

    def use(self, hashes: list[int]) -> None:
        """One more sequence uses blocks that exist on the device."""
        users, unused = self._users, self._unused
        for name in hashes:
            if users[name]:
                self.repeated += 1
            else:
                del unused[name]
            users[name] += 1

    def add(self, name: int) -> bool:
        """A block in use becomes one of the cache, with one user; False where the cache has one like it."""
        if name in self._users:
            return False
        self._users[name] = 1
        self._host.pop(name, None)
        return True

    def leave(self, hashes: list[int]) -> None:
        """A sequence no longer uses its blocks; the last of them will be evicted first."""
        users, unused = self._users, self._unused
        for name in reversed(hashes):
            users[name] = left = users[name] - 1
            if left:
                self.repeated -= 1
            else:
                unused[name] = None

    def evict(self, blocks: int) -> int:
        """Gives up `blocks` blocks that nobody uses, those of longest ago first, and returns how many."""
        for _ in range(blocks):
            name, _ = self._unused.popitem(last=False)
            del self._users[name]
            if self.keeper is not None:
                self.keeper.evicted(name, to_host=self.host_blocks > 0)
            if self.host_blocks:
                self._host[name] = None
                if len(self._host) > self.host_blocks:
                    lost, _ = self._host.popitem(last=False)
                    if self.keeper is not None:
                        self.keeper.forgotten(lost)
        self.evicted += blocks
        return blocks

    def check_integrity(self, sequences: list[list[int]]) -> None:
        """Asserts that users are counted rightly, given the hashes that each sequence uses."""
        users = dict.fromkeys(self._users, 0)
        for hashes in sequences:
            for name in hashes:
                users[name] += 1
        assert users == self._users, "a block's users are miscounted"
        assert self.repeated == sum(count - 1 for count in users.values() if count), "repeated uses are miscounted"
        assert set(self._unused) == {name for name, count in users.items() if not count}, "unused blocks are miscounted"
        assert not set(self._host) & set(self._users), "a block is on the host and on the device"
