"""Absorbed multi-head latent attention: the fp32 softmax over latent vectors that are key and value at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.mla_decode import mla_decode, mla_decode_bytes, mla_decode_reference  # noqa: E402

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value, for q, probabilities and result


def make_latents(contexts, block_size, width, dtype, device):
    """Latent vectors in shuffled blocks; unused memory is NaN."""
    random = torch.Generator().manual_seed(sum(contexts))
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 1, generator=random).int()
    table = torch.full((len(contexts), max(counts) + 1), 2**30, dtype=torch.int32)
    cache = torch.full((len(order), block_size, width), torch.nan)
    for i, context in enumerate(contexts):
        table[i, : counts[i]] = order[sum(counts[:i]) : sum(counts[: i + 1])]
        for t in range(context):
            cache[table[i, t // block_size], t % block_size] = torch.randn(width, generator=random)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    return cache.to(device, dtype), table.to(device), lengths


@settings(deadline=None, max_examples=15)
@given(
    contexts=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    heads=st.sampled_from([1, 5, 16, 20]),
    sizes=st.sampled_from([(32, 16), (64, 32), (128, 64)]),
    block_size=st.sampled_from([1, 5, 16]),
    splits=st.sampled_from([1, 2, 7]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_mla_decode_is_the_softmax_of_the_fp32_reference(device, contexts, heads, sizes, block_size, splits, dtype):
    rank, rope = sizes
    cache, table, lengths = make_latents(contexts, block_size, rank + rope, dtype, device)
    q = torch.randn(len(contexts), heads, rank + rope, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    config = Config({"BLOCK_R": 16, "BLOCK_T": 16})
    y = mla_decode(q, cache, table, lengths, 0.1, rank=rank, splits=splits, config=config)
    reference = mla_decode_reference(q, cache, table, lengths, 0.1, rank=rank)
    assert y.shape == (len(contexts), heads, rank)
    assert (y.float() - reference).abs().max() <= TOLERANCE[dtype] * max(float(reference.abs().max()), 1.0)


@settings(deadline=None, max_examples=15)
@given(
    new=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    before=st.integers(0, 40),
    heads=st.sampled_from([1, 5, 16]),
    splits=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 99),
)
def test_drafts_see_the_context_and_their_ancestors(device, new, before, heads, splits, seed):
    """Each token's ancestors are itself and a random half of those before it."""
    contexts = [before * (i + 1) + count for i, count in enumerate(new)]
    cache, table, lengths = make_latents(contexts, 5, 48, torch.bfloat16, device)
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(new), heads, 48, generator=random).to(device, torch.bfloat16)
    own = torch.tensor([1 << token for count in new for token in range(count)])
    tree = ((torch.randint(0, 2**40, own.shape, generator=random) & (own - 1)) | own).to(device)
    starts = torch.tensor([0, *new]).cumsum(0).int().to(device)
    where = q, cache, table, lengths, 0.1
    config = Config({"BLOCK_R": 16, "BLOCK_T": 16})
    drafts = dict(rank=32, tree=tree, query_start=starts)
    y = mla_decode(*where, **drafts, most_queries=max(new), splits=splits, config=config)
    reference = mla_decode_reference(*where, **drafts)
    assert (y.float() - reference).abs().max() <= 2e-2 * max(float(reference.abs().max()), 1.0)


def test_its_stored_configuration_gives_the_same_at_deepseeks_sizes(device):
    cache, table, lengths = make_latents([90, 0, 33], 16, 576, torch.bfloat16, device)
    q = torch.randn(3, 24, 576, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    y = mla_decode(q, cache, table, lengths, 192**-0.5, rank=512)
    reference = mla_decode_reference(q, cache, table, lengths, 192**-0.5, rank=512)
    assert (y.float() - reference).abs().max() <= 2e-2 * max(float(reference.abs().max()), 1.0)


def test_the_cache_is_counted_once_for_all_heads():
    q = torch.zeros(2, 128, 576, dtype=torch.bfloat16)
    assert mla_decode_bytes(q, [100, 7], 512) == 2 * 128 * (576 + 512) * 2 + 107 * 576 * 2


def test_bad_arguments_are_named(device):
    cache, table, lengths = make_latents([9], 4, 48, torch.bfloat16, device)
    q = torch.zeros(1, 2, 48, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"^rank: 40 of 48 elements leave 8"):
        mla_decode(q, cache, table, lengths, 1.0, rank=40)
    with pytest.raises(ValueError, match=r"^cache: dtype"):
        mla_decode(q, cache.half(), table, lengths, 1.0, rank=32)
    with pytest.raises(ValueError, match=r"^cache: shape"):
        mla_decode(q, cache[..., :32], table, lengths, 1.0, rank=32)
