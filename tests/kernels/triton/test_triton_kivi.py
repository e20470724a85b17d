"""KIVI's cache: keys by channel and values by token in 2 or 4 bits, the newest in bf16, rounded and read by kernels."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.kivi import KiviBlocks, make_room  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.kivi_attention import (  # noqa: E402
    kivi_attention,
    kivi_attention_bytes,
    kivi_attention_reference,
)
from membound.kernels.triton.kivi_round import kivi_round, kivi_round_bytes  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.roofline.models import GroupedQueryAttention  # noqa: E402
from membound.roofline.precision import get_precision  # noqa: E402
from membound.runtime.kv.kivi import KiviKv  # noqa: E402
from membound.runtime.rope import RopeTables  # noqa: E402

SMALL = Config({"BLOCK_R": 16, "BLOCK_T": 16})
SEATS = 4


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(new, contexts, block_size, device, seed=0):
    """Sequences in shuffled blocks and at shuffled seats; entries of the table that are not used are out of bounds."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 1, generator=random).int()
    table = torch.full((len(contexts), max(counts) + 1), 2**30, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) : sum(counts[: i + 1])]
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(new, contexts, strict=True)])
    lengths = torch.tensor(contexts, dtype=torch.int32)
    seats = torch.randperm(SEATS, generator=random)[: len(contexts)]
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return RaggedBatch(positions, positions, starts, lengths, table, max(new), seats).to(device)


def blocks_of(bits, group, window, batch, block_size, kv_heads, head_dim, device, seed=1):
    """A cache of the batch's contexts, whose unused numbers are NaN."""
    used = batch.block_table[batch.block_table < 2**30]
    count = int(used.max()) + 2 if len(used) else 1
    kv = KiviBlocks.zeros(bits, group, window, count, block_size, kv_heads, head_dim, SEATS, "cpu")
    for part in (kv.key_meta, kv.value_meta, kv.recent_keys, kv.recent_values):
        part.fill_(torch.nan)
    for i, (seat, context) in enumerate(zip(batch.seats.tolist(), batch.context_len.tolist(), strict=True)):
        keys, values = (normal(context, kv_heads, head_dim, seed=seed + 2 * i + j).bfloat16() for j in range(2))
        kv.keep(batch.block_table[i].cpu(), seat, keys, values, 0)
    return moved(kv, device)


def moved(kv, device):
    parts = *kv.parts, kv.recent_keys, kv.recent_values, kv.rounded
    return KiviBlocks(kv.bits, kv.group, *(part.clone().to(device) for part in parts))


@settings(deadline=None, max_examples=12)
@given(
    bits=st.sampled_from([2, 4]),
    contexts=st.lists(st.integers(1, 110), min_size=1, max_size=2),
    drafts=st.integers(0, 3),
    heads=st.sampled_from([(1, 1), (6, 2), (20, 1)]),
    head_dim=st.sampled_from([32, 64, 96]),
    block_size=st.sampled_from([4, 16, 64]),
    window=st.none() | st.integers(1, 200),
    splits=st.sampled_from([1, 2]),
)
def test_attention_over_codes_and_recent_tokens_is_that_over_what_they_mean(
    device, bits, contexts, drafts, heads, head_dim, block_size, window, splits
):
    new = [min(1 if window else drafts + 1, context) for context in contexts]
    batch = batch_of(new, contexts, block_size, device)
    kv = blocks_of(bits, 32, 64, batch, block_size, heads[1], head_dim, device)
    q = normal(sum(new), heads[0], head_dim, seed=9).bfloat16().to(device)
    y = kivi_attention(q, kv, batch, head_dim**-0.5, window=window, splits=splits, config=SMALL)
    reference = kivi_attention_reference(q, kv, batch, head_dim**-0.5, window=window)
    assert (y.float() - reference).abs().max() <= 2e-2 * max(float(reference.abs().max()), 1.0)


@settings(deadline=None, max_examples=15)
@given(
    bits=st.sampled_from([2, 4]),
    before=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    new=st.integers(1, 30),
    head_dim=st.sampled_from([32, 64]),
    block_size=st.sampled_from([4, 16, 64]),
)
def test_old_tokens_are_rounded_as_the_plain_ones_until_the_new_ones_fit(
    device, bits, before, new, head_dim, block_size
):
    contexts = [start + new for start in before]
    batch = batch_of([new] * len(before), contexts, block_size, device)
    kv = blocks_of(bits, 32, 64, with_context(batch, before), block_size, 2, head_dim, device)
    plain = moved(kv, "cpu")
    kivi_round(kv, batch)
    make_room(plain, batch.to(torch.device("cpu")))
    assert torch.equal(kv.rounded.cpu(), plain.rounded)
    seats, tables = batch.seats.tolist(), batch.block_table.cpu()
    for i, (seat, start) in enumerate(zip(seats, before, strict=True)):
        rounded = int(plain.rounded[seat, 0])
        assert contexts[i] - rounded <= 64 and rounded <= start
        if rounded:
            found = moved(kv, "cpu").unpacked(tables[i], rounded)
            expected, metas = plain.unpacked(tables[i], rounded), (kv.key_meta, kv.value_meta)
            for mine, theirs, meta in zip(found, expected, metas, strict=True):
                step = float(meta[..., 0].nan_to_num().max())  # a tie may be rounded to the other side
                assert (mine - theirs).abs().max() <= 1.01 * step
                assert (mine - theirs).abs().mean() <= 0.02 * step


def with_context(batch, contexts):
    """The same sequences before their new tokens."""
    lengths = torch.tensor(contexts, dtype=torch.int32, device=batch.context_len.device)
    return RaggedBatch(
        batch.positions, batch.slots, batch.query_start, lengths, batch.block_table, batch.most_queries, batch.seats
    )


@pytest.mark.parametrize("format", ["kivi2", "kivi4"])
def test_a_store_on_the_kernels_attends_as_the_plain_one_through_prompts_drafts_and_decode(format, device):
    """Two sequences, one of which begins anew at its seat; both sides keep K and V in the same formats."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=32)
    # Turned keys are cut off by the interpreter where the plain side rounds, and some get another code: none is turned.
    rope, plain_rope = RopeTables(torch.zeros(16, device=device), 512), RopeTables(torch.zeros(16), 512)
    sizes = attention, get_precision(format), 32, 16, SEATS
    fast, plain = (
        KiviKv(TritonKernels(device.type), *sizes, device),
        KiviKv(TorchKernels(), *sizes, torch.device("cpu")),
    )
    assert plain.emulated and plain.on_host and not fast.emulated and not fast.on_host
    table = torch.arange(32, dtype=torch.int32).view(2, 16)
    steps = [
        [(0, 154), (0, 40)],
        [(154, 158), (40, 44)],
        [(156, 157), (43, 44)],
        *[[(157 + i, 158 + i), (44 + i, 45 + i)] for i in range(14)],
        [(0, 1), (58, 59)],
    ]
    for number, parts in enumerate(steps):
        positions = torch.cat([torch.arange(start, end) for start, end in parts])
        starts = torch.tensor([0] + [end - start for start, end in parts]).cumsum(0).int()
        lengths = torch.tensor([end for _, end in parts], dtype=torch.int32)
        most = max(end - start for start, end in parts)
        batch = RaggedBatch(positions, positions, starts, lengths, table, most, torch.tensor([3, 1]))
        qkv = normal(len(positions), 8 * 32, seed=number).bfloat16()
        y = fast.attend(qkv.to(device), rope, batch.to(device), 0.2).float().cpu()
        expected = plain.attend(qkv.float(), plain_rope, batch, 0.2)
        assert (y - expected).square().mean().sqrt() < 0.05 * expected.std(), number


@pytest.mark.parametrize("format", ["kivi2", "kivi4"])
def test_the_declared_bytes_are_what_the_roofline_counts(format):
    precision = get_precision(format)
    contexts = [precision.window, precision.window + 320, precision.window - 5]
    kv = KiviBlocks.zeros(precision.width, 32, precision.window, 64, 16, 8, 128, 3, "meta")
    q = torch.empty(3, 32, 128, dtype=torch.bfloat16, device="meta")
    counted = sum(float(precision.cache_bytes(tokens, 2 * 8, 128)) for tokens in contexts)
    assert kivi_attention_bytes(q, kv, contexts) == 2 * q.nbytes + counted
    codes = float(
        precision.cache_bytes(precision.window + 32, 16, 128) - precision.cache_bytes(precision.window, 16, 128)
    )
    assert kivi_round_bytes(kv, 32) == 32 * 16 * 128 * 2 + codes


def test_bad_arguments_are_named(device):
    batch = batch_of([1], [40], 16, device)
    kv = blocks_of(2, 32, 64, batch, 16, 2, 64, device)
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=device)
    for wrong, name in ((q.float(), "q"), (q[:, :3], "q"), (q[..., :32], "q")):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            kivi_attention(wrong, kv, batch, 1.0)
    with pytest.raises(ValueError, match=r"^window: is 8 for up to 2 tokens"):
        two = batch_of([2], [40], 16, device)
        kivi_attention(torch.cat([q, q]), kv, two, 1.0, window=8)
    parts = vars(kv)
    for name in ("value_codes", "key_meta", "recent_values", "rounded"):
        with pytest.raises(ValueError, match=rf"^kv\.{name}: "):
            kivi_round(KiviBlocks(**{**parts, name: parts[name][..., :1].float()}), batch)
    tree = RaggedBatch(**{**vars(batch), "tree": torch.ones(1, dtype=torch.int64, device=device)})
    with pytest.raises(ValueError, match=r"^batch\.tree: "):
        kivi_attention(q, kv, tree, 1.0)
