"""Which KV blocks are free, and who holds the others?"""

from __future__ import annotations

from membound.simulator.scheduling.request import Sequence


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than a sequence needs."""


class BlockPool:
    """Paged KV memory as plain numbers: blocks of `block_size` tokens, each held by one sequence or free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that `sequence` still needs to hold its first `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - len(sequence.blocks))

    def can_grow(self, sequence: Sequence, tokens: int) -> bool:
        return self.missing(sequence, tokens) <= len(self._free)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Gives `sequence` the blocks to hold its first `tokens` tokens; raises OutOfBlocks and changes nothing."""
        missing = self.missing(sequence, tokens)
        if missing > len(self._free):
            raise OutOfBlocks(f"{missing} blocks needed, {len(self._free)} free")
        for _ in range(missing):
            sequence.blocks.append(self._free.pop())

    def shrink(self, sequence: Sequence, tokens: int) -> None:
        """Takes back the blocks beyond the first `tokens` tokens, which rejected drafts had used."""
        while len(sequence.blocks) > self.blocks_for(tokens):
            self._free.append(sequence.blocks.pop())

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks back."""
        self.shrink(sequence, 0)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Asserts that every block is either free or held by exactly one of `sequences`."""
        held = [block for sequence in sequences for block in sequence.blocks]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block was lost or is held twice"
