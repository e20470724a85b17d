"""How much KV memory is free, and which blocks does a sequence hold?"""

from __future__ import annotations

from typing import NamedTuple

from membound.simulator.scheduling.prefix import BlockName, Span, blocks_of, leading
from membound.simulator.scheduling.prefix_cache import PrefixCache
from membound.simulator.scheduling.request import Sequence

HostName = tuple[str, int | BlockName]


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

    def hold(self, blocks: int, prefix: list[Span]) -> list[Span]:
        """Takes `blocks` blocks whose content is here, those of `prefix` that the cache has as one more user; returns
        these."""
        if self.cache is None:
            self.take(blocks)
            return []
        found, _, _ = self.cache.found(prefix)
        shared = leading(prefix, found)
        self.cache.use(shared)
        self.take(blocks - found)
        return shared

    def give(self, blocks: int) -> None:
        """Takes blocks back."""
        self.free += blocks
        assert self.free <= self.num_blocks, "more blocks came back than were taken"


class Fill(NamedTuple):
    """`target` gets the content of another block, or what is kept on the host under a name."""

    source: int | HostName
    target: int


class Movements(NamedTuple):
    """What must be moved before the next step computes; all is read before anything is written.

    `saved` blocks are kept on the host under a name, `filled` ones get their content, and what is `dropped` from the
    host is still there for `filled`.
    """

    saved: tuple[tuple[int, HostName], ...]
    filled: tuple[Fill, ...]
    dropped: tuple[HostName, ...]


class BlockTables:
    """Which blocks each sequence holds, by number: what an engine that computes needs besides their count.

    A block that the prefix cache knows by the name of its tokens may be held by many sequences or by none, and is free
    when the cache evicts it. Blocks that are taken for a sequence whatever its length (`fixed_blocks`) come last.
    """

    def __init__(self, num_blocks: int, block_size: int, fixed_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.fixed_blocks = fixed_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._of_name: dict[BlockName, int] = {}
        self._named: dict[int, BlockName] = {}  # the name of each block that has one
        self._awaited: dict[int, list[tuple[int, int | HostName]]] = {}
        self._saved: list[tuple[int, HostName]] = []
        self._filled: list[Fill] = []
        self._dropped: dict[HostName, None] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Gives `sequence` the blocks of its first `tokens` tokens, and takes those beyond them back."""
        blocks = sequence.blocks
        wanted = self.fixed_blocks - (-tokens // self.block_size) if tokens else 0
        while len(blocks) < wanted:
            blocks.append(self._free.pop())
        while len(blocks) > wanted:
            block = blocks.pop()
            if block not in self._named:
                self._free.append(block)
        awaited = self._awaited.pop(sequence.id, ())
        self._filled += [Fill(source, blocks[index]) for index, source in awaited if index < len(blocks)]

    def movements(self) -> Movements:
        """What was to be moved since this was last asked."""
        movements = Movements(tuple(self._saved), tuple(self._filled), tuple(self._dropped))
        self._saved, self._filled, self._dropped = [], [], {}
        return movements

    def block_of(self, name: BlockName) -> int:
        """The block that the prefix cache knows by a name."""
        return self._of_name[name]

    def share(self, sequence: Sequence, here: list[BlockName], there: list[BlockName], copied: int | None) -> None:
        """`sequence`, which holds nothing yet, begins with the blocks of the names `here`.

        Those behind them are filled from the host, by the names `there`, and the next from the block `copied`.
        """
        assert not sequence.blocks, "blocks are shared before others are taken"
        sequence.blocks += [self._of_name[name] for name in here]
        sources: list[int | HostName] = [("prefix", name) for name in there]
        sources += [] if copied is None else [copied]
        if sources:
            self._awaited[sequence.id] = list(enumerate(sources, start=len(here)))

    def name(self, sequence: Sequence, name: BlockName) -> None:
        """The prefix cache knows the block of `sequence` at the index of `name` by it from now on."""
        _, index = name
        block = sequence.blocks[index]
        self._of_name[name], self._named[block] = block, name
        self._dropped["prefix", name] = None

    @staticmethod
    def swapped(sequence: Sequence, index: int) -> HostName:
        """What block `index` of a sequence is called on the host."""
        return f"swap {sequence.id}", index

    def swap_out(self, sequence: Sequence) -> None:
        """What `sequence` has computed is kept on the host; its blocks may then be taken."""
        if sequence.id in self._awaited:  # it was to come back in this very step, and stays where it is
            for _, source in self._awaited.pop(sequence.id):
                assert isinstance(source, tuple), "what was swapped out comes from the host"
                del self._dropped[source]
            return
        computed = -(-sequence.computed // self.block_size)
        self._saved += [(block, self.swapped(sequence, i)) for i, block in enumerate(sequence.blocks[:computed])]

    def swap_in(self, sequence: Sequence) -> None:
        """The blocks that `sequence` is about to get are filled with what it left on the host."""
        computed = -(-sequence.computed // self.block_size)
        names = [self.swapped(sequence, i) for i in range(computed)]
        self._awaited[sequence.id] = list(enumerate(names))
        self._dropped |= dict.fromkeys(names)

    def evicted(self, name: BlockName, to_host: bool) -> None:
        """The prefix cache gives up a block, whose content goes to the host or is lost."""
        block = self._of_name.pop(name)
        del self._named[block]
        self._free.append(block)
        if to_host:
            self._saved.append((block, ("prefix", name)))
            self._dropped.pop(("prefix", name), None)

    def forgotten(self, name: BlockName) -> None:
        """The prefix cache gives up a block on the host."""
        self._dropped["prefix", name] = None

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Asserts that every block is free, or the prefix cache's, or held by exactly one of `sequences`."""
        own = [block for sequence in sequences for block in sequence.blocks if block not in self._named]
        everything = sorted([*own, *self._named, *self._free])
        assert everything == list(range(self.num_blocks)), "a block was lost or is held twice"
        assert {block: name for name, block in self._of_name.items()} == self._named, "a block has two names"
        for sequence in sequences:
            shared = {self._named[block] for block in sequence.blocks if block in self._named}
            assert shared == set(blocks_of(sequence.cached)), "a sequence holds another's block"
