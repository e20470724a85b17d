"""Who joins the batch, on which rank and with which blocks, and how much of each prompt is computed in a step?"""

from __future__ import annotations

from collections.abc import Iterable

from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.holdings import Holdings
from membound.simulator.scheduling.policies import Batching, Order
from membound.simulator.scheduling.prefix import Span, between, blocks_of, count_of, leading
from membound.simulator.scheduling.request import Sequence, Work
from membound.simulator.scheduling.waiting import WaitingLine


class Joining:
    """Takes sequences from the `line` to the `prompts` under way, or back to the `decoders` where K and V exist.

    With data parallelism a sequence takes a seat and all its blocks on one rank, that with the fewest sequences among
    those that have room: as TensorRT-LLM spreads what waits (its adp_router.py, which evens out requests before
    tokens).
    """

    def __init__(
        self,
        batching: Batching,
        order: Order,
        line: WaitingLine,
        decoders: Decoders,
        holdings: Holdings,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        micro_batches: int,
    ) -> None:
        self.batching = batching
        self.order = order
        self.line = line
        self.decoders = decoders
        self.holdings = holdings
        self.pools = holdings.pools
        self.tables = holdings.tables
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.micro_batches = micro_batches
        self.prompts: dict[int, Sequence] = {}
        self.reserved: dict[int, Sequence] = {}  # whose blocks are taken, and which have not joined
        # Since the last step: blocks that crossed to or from the host on each rank, and tokens found in a cache.
        self.moved_blocks = [0] * len(self.pools)
        self.cached_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self.decoders.members) + len(self.prompts)

    @property
    def seats_of_rank(self) -> int:
        return -(-self.max_num_seqs // len(self.pools))

    def reserve(self, sequence: Sequence) -> bool:
        """Takes the blocks of one whose K and V are to come from elsewhere, before they do; False where no rank has
        them."""
        for rank in self._ranks_for(sequence, seated=False):
            needed = self._blocks_to_resume(sequence)
            if needed <= self.pools[rank].available:
                self.pools[rank].take(needed)
                sequence.rank, sequence.reserved_blocks = rank, needed
                self.reserved[sequence.id] = sequence
                return True
        return False

    def work(self, taken: list[int], joined: list[Sequence], *, join: bool) -> list[Work]:
        """Work on prompts beside the tokens `taken` on each rank: those begun, then with `join` those that join.

        Each goes into the micro-batch where most room is left. Who joins is added to `joined`.
        """
        rooms = self._rooms(taken)
        planned: list[Work] = []
        for sequence in self.prompts.values():
            here = rooms[sequence.rank]
            if (room := max(here)) > 0:
                planned.append(_chunk(sequence, room))
                here[here.index(room)] -= planned[-1].tokens
        while join and self.line and self.num_running < self.max_num_seqs:
            sequence = self.line.first
            for rank in self._ranks_for(sequence):
                room = max(rooms[rank])
                if room > 0 and self._join(sequence, room, rank):
                    break
            else:
                break
            joined.append(sequence)
            here = rooms[sequence.rank]
            if sequence.clock is not None:
                here[here.index(room)] -= 1
                continue
            planned.append(_chunk(sequence, room))
            here[here.index(room)] -= planned[-1].tokens
        return planned

    def _rooms(self, taken: list[int]) -> list[list[int]]:
        """Tokens that are left in each micro-batch of each rank, over which those `taken` on it are spread."""
        most, parts = self.max_batched_tokens, self.micro_batches
        return [[most - (tokens + part) // parts for part in range(parts)] for tokens in taken]

    def _ranks_for(self, sequence: Sequence, seated: bool = True) -> Iterable[int]:
        """Ranks, with a seat where it is to be `seated`, that with the fewest sequences first; of those with equally
        many that with more room."""
        if len(self.pools) == 1:
            return (0,)
        taken = self.decoders.on_rank.copy()
        for prompt in self.prompts.values():
            taken[prompt.rank] += 1
        ranks = [sequence.rank] if sequence.swapped_blocks or sequence.reserved_blocks else range(len(self.pools))
        free = [rank for rank in ranks if not seated or taken[rank] < self.seats_of_rank]
        for other in self.reserved.values():
            taken[other.rank] += 1
        return sorted(free, key=lambda rank: (taken[rank], -self.pools[rank].available))

    def _join(self, sequence: Sequence, room: int, rank: int) -> bool:
        """Takes the first who waits out of the queue, with all blocks of its tokens; False where `rank` lacks them."""
        pool, cache = self.pools[rank], self.pools[rank].cache
        if sequence.loaded:
            return self._resume(sequence, rank)
        here = idle = there = computed = last = 0
        spans: list[Span] = []
        if cache is not None and sequence.request.prefix is not None:
            spans = sequence.request.prefix.spans(pool.block_size, sequence.tokens)
            # The last token must be computed to emit the next one: a block that it fills is not shared but copied.
            last = (sequence.tokens - 1) // pool.block_size
            here, idle, there = cache.found(leading(spans, last))
            computed = (here + there) * pool.block_size
            if here + there == last < count_of(spans) and cache.has((spans[-1].id, last)):
                computed = sequence.tokens - 1
        cut = room == self.max_batched_tokens and self.batching.cuts_long_prompts
        if self.batching.whole_prompts and sequence.tokens - computed > room and not cut:
            return False
        needed = pool.blocks_for(self.holdings.reserving.held(sequence.request, sequence.tokens)) - here
        if needed > pool.available - idle:
            return False
        self.line.leave()
        sequence.rank = rank
        if cache is not None:
            sequence.cached = leading(spans, here)
            cache.use(sequence.cached)
            if self.tables is not None:
                copies = computed > (here + there) * pool.block_size
                copied = self.tables.block_of((spans[-1].id, last)) if copies else None
                moved = between(spans, here, here + there)
                self.tables.share(sequence, blocks_of(sequence.cached), blocks_of(moved), copied)
            self.moved_blocks[rank] += there
            self.cached_tokens += computed
            if sequence.cached_tokens is None:
                sequence.cached_tokens = computed
        pool.take(needed)
        sequence.standing_computed = computed
        sequence.status = "running"
        self.prompts[sequence.id] = sequence
        return True

    def _resume(self, sequence: Sequence, rank: int) -> bool:
        """A sequence whose K and V exist elsewhere decodes at once: it comes back from the host, or from a prefill."""
        pool = self.pools[rank]
        needed = self._blocks_to_resume(sequence) - sequence.reserved_blocks
        if needed > pool.available:
            return False
        self.line.leave()
        if self.reserved.pop(sequence.id, None) is not None:
            sequence.key, sequence.reserved_blocks = self.order.key(sequence), 0
        sequence.rank = rank
        pool.take(needed)
        if self.tables is not None:
            self.tables.swap_in(sequence)
        if sequence.swapped_blocks:
            self.moved_blocks[rank] += sequence.swapped_blocks
            pool.host_free += sequence.swapped_blocks
            sequence.swapped_blocks = 0
        sequence.loaded = False
        sequence.status = "running"
        self.decoders.add(sequence)
        return True

    def _blocks_to_resume(self, sequence: Sequence) -> int:
        # Where steps of prompts go alone, the blocks of the next token are taken after this.
        tokens = sequence.computed if self.batching.prompts_alone else sequence.tokens
        return self.holdings.of(sequence, tokens)


def _chunk(sequence: Sequence, room: int) -> Work:
    left = sequence.left_to_compute
    tokens = min(left, room)
    return Work(sequence.id, sequence.standing_computed, tokens, (), tokens == left)
