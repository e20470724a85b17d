"""How much KV memory is free, and which blocks does a sequence hold?"""

from __future__ import annotations

from membound.simulator.scheduling.prefix_cache import PrefixCache
from membound.simulator.scheduling.request import Sequence


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than a sequence needs."""


class BlockPool:
    """Paged KV memory as plain numbers: blocks of `block_size` tokens, each in use or free.

    Blocks that only the prefix cache still holds count as in use, but are `available`: it gives up the oldest. The
    host has room for `host_blocks` more, which take what is swapped out. A sequence takes `fixed_blocks` whatever its
    length.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache | None = None,
        host_blocks: int = 0,
        fixed_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = num_blocks
        self.cache = cache
        self.host_free = host_blocks
        self.fixed_blocks = fixed_blocks

    @property
    def used(self) -> int:
        return self.num_blocks - self.free

    @property
    def available(self) -> int:
        return self.free if self.cache is None else self.free + self.cache.unused

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens fills, the last one perhaps in part."""
        return self.fixed_blocks - (-tokens // self.block_size)

    def take(self, blocks: int) -> None:
        """Raises OutOfBlocks and changes nothing where fewer are available."""
        if blocks > self.free:
            if blocks > self.available:
                raise OutOfBlocks(f"{blocks} blocks needed, {self.available} available")
            assert self.cache is not None, "without a cache, available is free"
            self.free += self.cache.evict(blocks - self.free)
        self.free -= blocks

    def give(self, blocks: int) -> None:
        """Takes blocks back."""
        self.free += blocks
        assert self.free <= self.num_blocks, "more blocks came back than were taken"


class BlockTables:
    """Which blocks each sequence holds, by number: what an engine that computes needs besides their count."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Gives `sequence` the blocks of its first `tokens` tokens, and takes those beyond them back."""
        wanted = -(-tokens // self.block_size)
        while len(sequence.blocks) < wanted:
            sequence.blocks.append(self._free.pop())
        while len(sequence.blocks) > wanted:
            self._free.append(sequence.blocks.pop())

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Asserts that every block is either free or held by exactly one of `sequences`."""
        held = [block for sequence in sequences for block in sequence.blocks]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block was lost or is held twice"
