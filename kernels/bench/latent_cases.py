"""With which latents and queries is multi-head latent attention checked and timed?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from membound.kernels.bench.attention_cases import BLOCK_SIZE, ODD, block_table
from membound.kernels.bench.trial import Case, Comparison, Inputs, Trial, attended
from membound.kernels.triton.mla_decode import mla_decode, mla_decode_bytes, mla_decode_reference
from membound.kernels.triton.mla_prefill import (
    mla_prefill,
    mla_prefill_bytes,
    mla_prefill_flops,
    mla_prefill_reference,
)


def _mla(inputs: Inputs, contexts: Sequence[int], heads: int, rank: int, rope: int) -> Trial:
    blocks, table = block_table(inputs, contexts)
    cache, q = inputs.normal(blocks, BLOCK_SIZE, rank + rope), inputs.normal(len(contexts), heads, rank + rope)
    where = q, cache, table, inputs.of(contexts), 192**-0.5

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, mla_decode_reference(*where, rank=rank))]

    flops = 2 * heads * (2 * rank + rope) * sum(contexts)
    return Trial(lambda: mla_decode(*where, rank=rank), compare, mla_decode_bytes(q, contexts, rank), flops)


def _mla_prefill(
    inputs: Inputs, new: Sequence[int], contexts: Sequence[int], heads: int, own: int, shared: int, value: int
) -> Trial:
    q, kept = inputs.normal(sum(new), heads, own + shared), sum(contexts)
    unpacked, latents = inputs.normal(kept, heads, own + value), inputs.normal(kept, 32 + shared)
    edges = (inputs.of([sum(counts[:i]) for i in range(len(counts) + 1)]) for counts in (new, contexts))
    where = q, unpacked, latents[:, 32:], *edges, (own + shared) ** -0.5

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, mla_prefill_reference(*where))]

    flops = mla_prefill_flops(q, value, new, contexts)
    return Trial(lambda: mla_prefill(*where), compare, mla_prefill_bytes(q, unpacked, latents[:, 32:]), flops)


def _mla_drafts(inputs: Inputs, new: Sequence[int], contexts: Sequence[int], heads: int, rank: int, rope: int) -> Trial:
    """Drafts that follow one another."""
    blocks, table = block_table(inputs, contexts)
    cache, starts = inputs.normal(blocks, BLOCK_SIZE, rank + rope), [sum(new[:i]) for i in range(len(new) + 1)]
    q, edges = inputs.normal(starts[-1], heads, rank + rope), inputs.of(starts)
    where = q, cache, table, inputs.of(contexts), 192**-0.5
    # The masks are made on the host: those of a GPU are made once a step, not once a layer.
    tree = inputs.of([2 ** (j + 1) - 1 for count in new for j in range(count)], torch.int64)

    def compare(y: Tensor) -> list[Comparison]:
        return [attended(y, mla_decode_reference(*where, rank=rank, tree=tree, query_start=edges))]

    def run() -> Tensor:
        return mla_decode(*where, rank=rank, tree=tree, query_start=edges, most_queries=max(new))

    flops = 2 * heads * (2 * rank + rope) * sum(n * c for n, c in zip(new, contexts, strict=True))
    return Trial(run, compare, mla_decode_bytes(q, contexts, rank) + tree.nbytes, flops)


CASES = [
    Case(
        "mla_prefill",
        "5 heads of 48 + 32, chunks of 9, 1 and 40",
        partial(_mla_prefill, new=[9, 1, 40], contexts=[37, 20, 40], heads=5, own=48, shared=32, value=64),
        True,
    ),
    Case("mla_decode", "5 heads of 64 + 32", partial(_mla, contexts=ODD, heads=5, rank=64, rope=32), True),
    Case(
        "mla_decode",
        "5 heads of 64 + 32, chunks of 5, 1 and 9",
        partial(_mla_drafts, new=[5, 1, 9], contexts=[*ODD[:1], 1, 130], heads=5, rank=64, rope=32),
        True,
    ),
    Case(
        "mla_prefill",
        "16 heads of 128 + 64, 4 prompts of 2048",
        partial(_mla_prefill, new=[2048] * 4, contexts=[2048] * 4, heads=16, own=128, shared=64, value=128),
    ),
    Case(
        "mla_decode", "128 heads, batch 16, kv 8192", partial(_mla, contexts=[8192] * 16, heads=128, rank=512, rope=64)
    ),
    Case(
        "mla_decode",
        "128 heads, batch 16, 4 tokens each, kv 8192",
        partial(_mla_drafts, new=[4] * 16, contexts=[8192] * 16, heads=128, rank=512, rope=64),
    ),
]
