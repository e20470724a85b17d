"""With which caches and queries are the attention kernels checked and timed?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.bench import peers
from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, attended, exact
from membound.kernels.kivi import KiviBlocks, make_room
from membound.kernels.triton.decode_attention import (
    decode_attention,
    decode_attention_bytes,
    decode_attention_reference,
)
from membound.kernels.triton.kivi_attention import (
    kivi_attention,
    kivi_attention_bytes,
    kivi_attention_reference,
)
from membound.kernels.triton.kivi_round import kivi_round, kivi_round_bytes
from membound.kernels.triton.kv_blocks import KvBlocks, KvFormat
from membound.kernels.triton.prefill_attention import (
    prefill_attention,
    prefill_attention_bytes,
    prefill_attention_flops,
    prefill_attention_reference,
)
from membound.kernels.triton.verify_attention import (
    verify_attention,
    verify_attention_bytes,
    verify_attention_reference,
)

BLOCK_SIZE = 16
Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
LLAMA_8B: Heads = (32, 8, 128)


def block_table(inputs: Inputs, contexts: Sequence[int]) -> tuple[int, Tensor]:
    """How many blocks there are, and each sequence's, shuffled; entries that are not used point out of bounds."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = inputs.order(sum(counts) + 1).int()
    table = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32, device=inputs.device)
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) : sum(counts[:i]) + count]
    return len(order), table


def _cache(inputs: Inputs, format: KvFormat, contexts: Sequence[int], heads: Heads) -> tuple[KvBlocks, Tensor]:
    """A cache full of random numbers and its block table."""
    blocks, table = block_table(inputs, contexts)
    _, kv_heads, head_dim = heads
    if format == "bf16":
        k, v = (inputs.normal(blocks, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2))
        return KvBlocks(format, k, v), table
    kv = KvBlocks.zeros(format, blocks, BLOCK_SIZE, kv_heads, head_dim, inputs.device)
    assert kv.scales is not None
    for stored in (kv.k, kv.v):
        if format == "fp8":
            stored.copy_(inputs.normal(*stored.shape).to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            low, high = (-127, 128) if format == "int8" else (0, 256)
            stored.copy_(inputs.integers(low, high, *stored.shape, dtype=stored.dtype))
    size = {"fp8": 1.0, "int8": 0.02, "int4": 0.2}[format]
    kv.scales.copy_(inputs.uniform(*kv.scales.shape) * size)
    if format == "int4":
        kv.scales[..., 1::2] -= 1.5
    return kv, table


def _decode(
    inputs: Inputs, format: KvFormat, contexts: Sequence[int], heads: Heads, window: int | None = None
) -> Trial:
    kv, table = _cache(inputs, format, contexts, heads)
    q, scale = inputs.normal(len(contexts), heads[0], heads[2]), heads[2] ** -0.5
    where = q, kv, table, inputs.of(contexts), scale
    visible = [min(context, window or context) for context in contexts]

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, decode_attention_reference(*where, window=window))]

    beside = {}
    if format == "bf16" and window is None:
        beside = {
            "torch SDPA": partial(peers.sdpa_decode, q, kv, table, contexts, scale),
            "FlashInfer": partial(peers.flashinfer_decode, q, kv, table, contexts),
        }
    nbytes = decode_attention_bytes(q, kv, contexts, window)
    flops = 4 * heads[0] * heads[2] * sum(visible)
    return Trial(lambda: decode_attention(*where, window=window), compare, nbytes, flops, peers=beside)


def _ragged(inputs: Inputs, new: Sequence[int], contexts: Sequence[int], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, where each sequence's tokens begin, and the contexts."""
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    return inputs.normal(starts[-1], heads[0], heads[2]), inputs.of(starts), inputs.of(contexts)


def _prefill(
    inputs: Inputs,
    format: KvFormat,
    new: Sequence[int],
    contexts: Sequence[int],
    heads: Heads,
    window: int | None = None,
) -> Trial:
    kv, table = _cache(inputs, format, contexts, heads)
    q, starts, lengths = _ragged(inputs, new, contexts, heads)
    where = q, kv, table, starts, lengths, heads[2] ** -0.5

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, prefill_attention_reference(*where, window=window))]

    beside = {}
    if format == "bf16" and window is None and list(new) == list(contexts) and len(set(new)) == 1:
        beside["torch SDPA"] = partial(peers.sdpa_prefill, q, kv, table, new[0])
    # With a window fewer pairs are computed; the cases that are timed have none.
    flops = prefill_attention_flops(q, new, contexts)
    nbytes = prefill_attention_bytes(q, kv, contexts)
    return Trial(lambda: prefill_attention(*where, window=window), compare, nbytes, flops, peers=beside)


def _verify(
    inputs: Inputs,
    format: KvFormat,
    new: Sequence[int],
    contexts: Sequence[int],
    heads: Heads,
    window: int | None = None,
) -> Trial:
    """Each token's ancestors are itself and a random half of those before it."""
    kv, table = _cache(inputs, format, contexts, heads)
    q, starts, lengths = _ragged(inputs, new, contexts, heads)
    place = inputs.of([token for count in new for token in range(count)], torch.int64)
    own = torch.ones_like(place) << place
    tree = (inputs.integers(0, 2**62, len(place)) & (own - 1)) | own
    where = kv, table, starts, lengths, heads[2] ** -0.5

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, verify_attention_reference(q, tree, *where, window=window))]

    def run() -> Tensor:
        return verify_attention(q, tree, *where, most_queries=max(new), window=window)

    # With a window fewer pairs are computed; the case that is timed has new tokens enough to see all that is read.
    seen = None if window is None else window + max(new) - 1
    flops = prefill_attention_flops(q, new, [min(context, seen or context) for context in contexts])
    return Trial(run, compare, verify_attention_bytes(q, kv, contexts, seen), flops)


def _kivi(
    inputs: Inputs, bits: int, new: Sequence[int], contexts: Sequence[int], heads: Heads
) -> tuple[KiviBlocks, RaggedBatch]:
    """A cache full of random numbers, as it is behind the new tokens; keys by channel, values by token."""
    blocks, table = block_table(inputs, contexts)
    _, kv_heads, head_dim = heads
    seats = inputs.order(len(contexts) + 1)[:-1]
    sizes = 32, 128, blocks, BLOCK_SIZE, kv_heads, head_dim, len(contexts) + 1
    kv = KiviBlocks.zeros(bits, *sizes, inputs.device)
    for codes, meta in ((kv.key_codes, kv.key_meta), (kv.value_codes, kv.value_meta)):
        codes.copy_(inputs.integers(0, 256, *codes.shape, dtype=torch.uint8))
        meta.copy_(0.5 * inputs.uniform(*meta.shape))
        meta[..., 1] -= 0.75
    for recent in (kv.recent_keys, kv.recent_values):
        recent.copy_(inputs.normal(*recent.shape))
    kv.rounded[seats] = inputs.of([kv.groups_before(context) for context in contexts])[:, None]
    starts = inputs.of([sum(new[:i]) for i in range(len(new) + 1)])
    ends = [c - n + j for n, c in zip(new, contexts, strict=True) for j in range(n)]
    places = inputs.of(ends, torch.int64)
    return kv, RaggedBatch(places, places, starts, inputs.of(contexts), table, max(new), seats)


def _kivi_attention(inputs: Inputs, bits: int, new: Sequence[int], contexts: Sequence[int], heads: Heads) -> Trial:
    kv, batch = _kivi(inputs, bits, new, contexts, heads)
    q, scale = inputs.normal(sum(new), heads[0], heads[2]), heads[2] ** -0.5

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, kivi_attention_reference(q, kv, batch, scale))]

    flops = 4 * heads[0] * heads[2] * sum(n * c for n, c in zip(new, contexts, strict=True))
    nbytes = kivi_attention_bytes(q, kv, contexts)
    return Trial(lambda: kivi_attention(q, kv, batch, scale), compare, nbytes, flops)


def _kivi_round(inputs: Inputs, bits: int, contexts: Sequence[int], heads: Heads) -> Trial:
    """Each sequence has just so many tokens that a group must be rounded for the newest."""
    kv, batch = _kivi(inputs, bits, [1] * len(contexts), contexts, heads)
    group = kv.group
    kv.rounded[batch.seats] -= group
    plain = kv.clone()

    def compare(_: None) -> list[Comparison]:
        make_room(plain, batch)
        close = [exact(kv.rounded, plain.rounded)]
        for i, end in enumerate(plain.rounded[batch.seats][:, 0].tolist()):
            both = (cache.unpacked(batch.block_table[i], end) for cache in (kv, plain))
            for mine, theirs in zip(*both, strict=True):
                # A tie may be rounded to the other side: by a step of the spread of normal numbers.
                close.append(Comparison(mine[-group:], theirs[-group:], 0.0, 8.0 / (2**bits - 1)))
        return close

    before = kv.rounded.clone()

    def run() -> None:
        kv.rounded.copy_(before)  # what was rounded the last time is rounded again
        kivi_round(kv, batch)

    return Trial(run, compare, kivi_round_bytes(kv, group * len(contexts)))


FORMATS: tuple[KvFormat, ...] = ("bf16", "fp8", "int8", "int4")
ODD = [37, 1, 130]
LARGE: tuple[tuple[KvFormat, int, int], ...] = (  # the cache's format, sequences, context
    ("bf16", 1, 4096),
    ("bf16", 16, 4096),
    ("bf16", 64, 4096),
    ("bf16", 16, 32768),
    ("bf16", 1, 131072),
    ("fp8", 16, 8192),
    ("int8", 16, 8192),
    ("int4", 16, 8192),
)

CASES = [
    *(
        Case(
            "decode_attention",
            f"{f}, contexts 37, 1 and 130",
            partial(_decode, format=f, contexts=ODD, heads=(6, 2, 64)),
            True,
        )
        for f in FORMATS
    ),
    Case(
        "decode_attention",
        "bf16, one KV head, window 50",
        partial(_decode, format="bf16", contexts=ODD, heads=(20, 1, 80), window=50),
        True,
    ),
    *(
        Case(
            "prefill_attention",
            f"{f}, chunks 9, 1 and 40",
            partial(_prefill, format=f, new=[9, 1, 40], contexts=[37, 20, 40], heads=(6, 2, 64)),
            True,
        )
        for f in FORMATS
    ),
    Case(
        "prefill_attention",
        "bf16, window 20",
        partial(_prefill, format="bf16", new=[9, 40], contexts=[37, 40], heads=(4, 4, 96), window=20),
        True,
    ),
    *(
        Case(
            "verify_attention",
            f"{f}, trees of 5, 1 and 9",
            partial(_verify, format=f, new=[5, 1, 9], contexts=[150, 20, 9], heads=(6, 2, 64)),
            True,
        )
        for f in FORMATS
    ),
    *(
        Case(
            "verify_attention",
            f"bf16, window {window}, trees of 5, 1 and 9",
            partial(_verify, format="bf16", new=[5, 1, 9], contexts=[150, 20, 9], heads=(6, 2, 64), window=window),
            True,
        )
        for window in (3, 50)
    ),
    *(
        Case(
            "kivi_attention",
            f"{bits} bits, chunks of 3, 1 and 9",
            partial(_kivi_attention, bits=bits, new=[3, 1, 9], contexts=[37, 1, 230], heads=(6, 2, 64)),
            True,
        )
        for bits in (2, 4)
    ),
    *(
        Case(
            "kivi_round",
            f"{bits} bits, 2 sequences",
            partial(_kivi_round, bits=bits, contexts=[129, 225], heads=(6, 2, 64)),
            True,
        )
        for bits in (2, 4)
    ),
    *(
        Case(
            "decode_attention",
            f"{f}, batch {b}, kv {kv}",
            partial(_decode, format=f, contexts=[kv] * b, heads=LLAMA_8B),
        )
        for f, b, kv in LARGE
    ),
    Case(
        "decode_attention",
        "bf16, MQA, batch 64, kv 8192",
        partial(_decode, format="bf16", contexts=[8192] * 64, heads=(32, 1, 128)),
    ),
    Case(
        "decode_attention",
        "bf16, MHA, batch 16, kv 4096",
        partial(_decode, format="bf16", contexts=[4096] * 16, heads=(32, 32, 128)),
    ),
    *(
        Case(
            "kivi_attention",
            f"{bits} bits, batch 16, kv 8192",
            partial(_kivi_attention, bits=bits, new=[1] * 16, contexts=[8192] * 16, heads=LLAMA_8B),
        )
        for bits in (2, 4)
    ),
    Case(
        "kivi_round",
        "2 bits, 64 sequences",
        partial(_kivi_round, bits=2, contexts=[4097] * 64, heads=LLAMA_8B),
    ),
    Case(
        "prefill_attention",
        "bf16, 4 prompts of 2048",
        partial(_prefill, format="bf16", new=[2048] * 4, contexts=[2048] * 4, heads=LLAMA_8B),
    ),
    Case(
        "prefill_attention",
        "bf16, a chunk of 1024 in 8192",
        partial(_prefill, format="bf16", new=[1024], contexts=[8192], heads=LLAMA_8B),
    ),
    Case(
        "prefill_attention",
        "fp8, 4 prompts of 2048",
        partial(_prefill, format="fp8", new=[2048] * 4, contexts=[2048] * 4, heads=LLAMA_8B),
    ),
    Case(
        "verify_attention",
        "bf16, 16 trees of 8 in 4096",
        partial(_verify, format="bf16", new=[8] * 16, contexts=[4096] * 16, heads=LLAMA_8B),
    ),
    Case(
        "verify_attention",
        "bf16, window 4096, 16 trees of 8 in 32768",
        partial(_verify, format="bf16", new=[8] * 16, contexts=[32768] * 16, heads=LLAMA_8B, window=4096),
    ),
]
