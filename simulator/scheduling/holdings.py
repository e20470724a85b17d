"""Which blocks does a running sequence hold, and which stay cached when it gives them up?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.simulator.scheduling.blocks import BlockPool, BlockTables
from membound.simulator.scheduling.prefix import blocks_of, count_of
from membound.simulator.scheduling.request import Sequence
from membound.simulator.scheduling.reservation import Reserving


@dataclass(frozen=True)
class Holdings:
    """The blocks of each rank's `pools`, numbered in `tables` where an engine computes."""

    pools: tuple[BlockPool, ...]
    reserving: Reserving
    tables: BlockTables | None

    def of(self, sequence: Sequence, tokens: int) -> int:
        """Blocks of a sequence that has `tokens` tokens, with those that it shares."""
        return self.pools[0].blocks_for(self.reserving.held(sequence.request, tokens))

    def share(self, sequence: Sequence) -> None:
        """Blocks of `sequence` that are full and computed become blocks of the prefix cache."""
        pool, prefix = self.pools[sequence.rank], sequence.request.prefix
        if pool.cache is None or prefix is None:
            return
        # What it found there it already uses; what others have meanwhile put there stays its own, a second time.
        added = pool.cache.add(prefix.spans(pool.block_size, sequence.computed, count_of(sequence.cached)))
        sequence.cached += added
        if self.tables is not None:
            for name in blocks_of(added):
                self.tables.name(sequence, name)

    def release(self, sequence: Sequence, held: int) -> None:
        """Gives up all its blocks; those that can be found again stay in the prefix cache."""
        self.share(sequence)
        pool = self.pools[sequence.rank]
        pool.give(held - count_of(sequence.cached))
        if pool.cache is not None:
            pool.cache.leave(sequence.cached)
            sequence.cached = []
        if self.tables is not None:
            self.tables.hold(sequence, 0)

    @property
    def in_use(self) -> int:
        """Blocks in use on all ranks."""
        used = 0
        for pool in self.pools:
            used += pool.num_blocks - pool.available
        return used

    @property
    def repeated_tokens(self) -> int:
        """Tokens that several sequences count, of blocks that they share."""
        if self.pools[0].cache is None:
            return 0
        repeated = sum([pool.cache.repeated for pool in self.pools if pool.cache is not None])
        return repeated * self.pools[0].block_size
