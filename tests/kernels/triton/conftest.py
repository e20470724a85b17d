"""Triton's kernels run by its interpreter where there is no GPU, on paged caches whose unused memory is poison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

HAS_GPU = torch.cuda.is_available()
with pytest.MonkeyPatch.context() as patch:
    # Triton asks when it is imported and when a kernel is defined; the processes that compile must not inherit it.
    if not HAS_GPU:
        assert "triton" not in sys.modules, "something imported triton before its interpreter was switched on"
        patch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
if not HAS_GPU:
    triton.knobs.runtime.interpret = True

from membound.kernels.triton.kv_blocks import KvBlocks, KvFormat  # noqa: E402


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="module", autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Whatever a kernel should write holds NaN or the smallest integer until it does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name)))
        yield


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        if out.device.type == "meta":
            return out
        return out.fill_(torch.nan if out.dtype.is_floating_point else torch.iinfo(out.dtype).min)

    return poisoned


@dataclass(frozen=True)
class Cache:
    """A paged cache of sequences with `context_len` tokens in shuffled blocks."""

    kv: KvBlocks
    block_table: torch.Tensor
    context_len: torch.Tensor


def _make_cache(
    format: KvFormat, contexts: list[int], block_size: int, kv_heads: int, head_dim: int, device: torch.device
) -> Cache:
    random = torch.Generator().manual_seed(len(contexts) + 7 * sum(contexts))
    counts = [-(-context // block_size) for context in contexts]
    blocks = sum(counts) + 2
    order = torch.randperm(blocks, generator=random).int()
    table = torch.full((len(contexts), max(counts, default=0) + 1), 2**30, dtype=torch.int32)  # unused: out of bounds
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) : sum(counts[:i]) + count]
    kv = KvBlocks.zeros(format, blocks, block_size, kv_heads, head_dim, "cpu")
    used = torch.zeros(blocks * block_size, dtype=torch.bool)
    for i, context in enumerate(contexts):
        used[[int(table[i, t // block_size]) * block_size + t % block_size for t in range(context)]] = True
    unused = ~used.view(blocks, block_size)
    for stored in (kv.k, kv.v):
        values = torch.randn(stored.shape, generator=random)
        if format == "fp8":
            stored.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
        elif format in ("int8", "int4"):
            low, high = (-127, 128) if format == "int8" else (0, 256)
            stored.copy_(torch.randint(low, high, stored.shape, generator=random))
        else:
            stored.copy_(values.masked_fill(unused[:, :, None, None], torch.nan))
    scales = kv.scales
    if format == "fp8":
        scales = 0.5 + torch.rand(kv.scales.shape, generator=random)
    elif scales is not None:
        scales = torch.rand(scales.shape, generator=random) * (0.02 if format == "int8" else 0.2)
        if format == "int4":
            scales[..., 1::2] -= 1.5
        scales = scales.masked_fill(unused[:, None, :, None], torch.nan).half()
    k, v, scales = (None if t is None else t.to(device) for t in (kv.k, kv.v, scales))
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return Cache(KvBlocks(format, k, v, scales), table.to(device), lengths)


@pytest.fixture(scope="session")
def make_cache(device: torch.device) -> Callable[..., Cache]:
    def make(format: KvFormat, contexts: list[int], block_size: int, kv_heads: int, head_dim: int) -> Cache:
        return _make_cache(format, contexts, block_size, kv_heads, head_dim, device)

    return make
