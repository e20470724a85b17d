"""How are blocks of the cache copied, in every layer at once?

For a prefix that two sequences share and one now writes on, for beams, and for compacting. One launch for all layers:
their addresses are in a table that is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from membound.kernels.base import BlockCopier
from membound.kernels.triton import check
from membound.kernels.triton.launch import configure, launch, machine_for


@triton.jit
def block_copy_kernel(bases, pairs, stride, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair, pool, piece of the block)."""
    source = tl.load(pairs + 2 * tl.program_id(0))
    target = tl.load(pairs + 2 * tl.program_id(0) + 1)
    base = tl.load(bases + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    here = word < WORDS
    tl.store(base + target * stride + word, tl.load(base + source * stride + word, mask=here), mask=here)


class BlockPools:
    """Tensors [blocks, ...] of one shape and stride whose blocks are copied together, such as all layers' K and V."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        check.require(len(pools) > 0, "pools", "is empty")
        first = pools[0]
        block_bytes, stride_bytes = first[0].nbytes, first.stride(0) * first.itemsize
        for name, size in (("a block", block_bytes), ("the stride of a block", stride_bytes)):
            check.require(size % 16 == 0, "pools", f"{name} is {size} bytes, should be a multiple of 16")
        for pool in pools:
            check.strided("pools", pool, first.shape, [first.dtype], first)
            check.require(pool.stride() == first.stride(), "pools", "differ in their strides")
            aligned = pool.device.type == "meta" or pool.data_ptr() % 16 == 0
            check.require(aligned, "pools", "one does not begin at a multiple of 16 bytes")
        self.pools = tuple(pools)
        self.block_bytes = block_bytes
        self._stride = stride_bytes // 4
        addresses = [0 if first.device.type == "meta" else pool.data_ptr() for pool in pools]
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=first.device)

    def copy(self, pairs: Tensor) -> None:
        """Copies, in every pool, block `pairs[i, 0]` to block `pairs[i, 1]` (int64, on the pools' device).

        No block is a target twice, or the source of one and the target of another.
        """
        check.tensor("pairs", pairs, [None, 2], [torch.int64], self.pools[0])
        config = configure("block_copy", machine_for(self.pools[0]))
        words = self.block_bytes // 4
        grid = (pairs.shape[0], len(self.pools), triton.cdiv(words, config.tiles["BLOCK"]))
        launch(block_copy_kernel, grid, self._bases, pairs, self._stride, config=config, WORDS=words)

    def copy_bytes(self, pairs: int) -> int:
        """Bytes that must move for so many pairs: each block in and out of every pool."""
        return 2 * pairs * len(self.pools) * self.block_bytes


def copied_in_words(pools: Sequence[Tensor]) -> bool:
    """Whether `BlockPools` takes them: blocks of whole 16 bytes, dense, that begin at a multiple of these."""
    sizes = (size * pool.itemsize for pool in pools for size in (pool[0].numel(), pool.stride(0)))
    dense = all(pool[0].is_contiguous() and pool.data_ptr() % 16 == 0 for pool in pools)
    return dense and all(size % 16 == 0 for size in sizes)


class TritonCopier:
    """One launch for all tensors of a shape; what the kernel does not take is left to `plain`."""

    def __init__(self, plain: Callable[[Sequence[Tensor]], BlockCopier], pools: Sequence[Tensor]) -> None:
        alike: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for pool in pools:
            alike.setdefault((pool.shape, pool.stride(), pool.dtype), []).append(pool)
        self._together = [BlockPools(group) for group in alike.values() if copied_in_words(group)]
        self._apart = plain([pool for group in alike.values() if not copied_in_words(group) for pool in group])
        self._all = plain(pools)
        self._device = pools[0].device if pools else None

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> None:
        if {source for source, _ in pairs} & {target for _, target in pairs}:
            self._all(pairs)  # which reads all before it writes, as programs that know nothing of each other do not
            return
        table = torch.tensor(pairs, dtype=torch.int64, device=self._device).view(-1, 2)
        for group in self._together:
            group.copy(table)
        self._apart(pairs)


def block_copy_reference(pools: Sequence[Tensor], pairs: Tensor) -> None:
    """The same, pair by pair."""
    for source, target in pairs.tolist():
        for pool in pools:
            pool[target] = pool[source]
