"""Recurrences of the C++ kernels: what the plain ones compute, step by step or all at once, and for nobody else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels import recurrent  # noqa: E402
from membound.kernels.base import DeltaNetVectors, Mamba2Vectors, RaggedBatch  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402

# (tokens before, new tokens) of each sequence
PARTS = st.lists(st.tuples(st.sampled_from([0, 5]), st.sampled_from([1, 2, 70])), min_size=1, max_size=4)
SEATS = 6


def batch_of(parts):
    """Sequences in seats that are not in their order."""
    positions = torch.cat([torch.arange(before, before + new) for before, new in parts])
    starts = torch.tensor([0, *(new for _, new in parts)]).cumsum(0)
    return RaggedBatch(
        positions=positions,
        slots=positions,
        query_start=starts.int(),
        context_len=torch.tensor([before + new for before, new in parts], dtype=torch.int32),
        block_table=torch.zeros(len(parts), 1, dtype=torch.int32),
        seats=torch.arange(SEATS - 1, SEATS - 1 - len(parts), -1),
    )


def agree(ours, plain):
    (y, state), (exact, exact_state) = ours, plain
    assert torch.allclose(y, exact, rtol=1e-3, atol=1e-4)
    assert torch.allclose(state, exact_state, rtol=1e-3, atol=1e-4), "also that of the seats of others"


@settings(deadline=None, max_examples=25)
@given(parts=PARTS, channels=st.sampled_from([1, 16, 37, 600]), width=st.sampled_from([2, 4]), biased=st.booleans())
def test_convolutions(cpp, parts, channels, width, biased):
    batch, random = batch_of(parts), torch.Generator().manual_seed(channels)
    x = torch.randn(batch.num_tokens, channels + 9, generator=random)[:, 4 : 4 + channels]
    weight = torch.randn(channels, width, generator=random)
    bias = torch.randn(channels, generator=random) if biased else None
    state = torch.randn(SEATS, width - 1, channels, generator=random)
    ours, plain = state.clone(), state.clone()
    agree(
        (cpp.causal_convolution(ours, x, weight, bias, batch), ours),
        (recurrent.causal_convolution(plain, x, weight, bias, batch), plain),
    )


@settings(deadline=None, max_examples=25)
@given(
    parts=PARTS, groups=st.sampled_from([1, 2]), each=st.integers(1, 3), dim=st.sampled_from([1, 16, 20]),
    d_state=st.sampled_from([5, 16, 64]),
)  # fmt: skip
def test_mamba2(cpp, parts, groups, each, dim, d_state):
    batch, random, heads = batch_of(parts), torch.Generator().manual_seed(dim), groups * each
    widths = [heads * dim, heads * dim, heads, groups * d_state, groups * d_state]
    wide = torch.randn(batch.num_tokens, sum(widths), generator=random)  # as a projection leaves them
    z, x, dt, b, c = wide.split(widths, dim=-1)
    x, z = (part.unflatten(1, (heads, dim)) for part in (x, z))
    b, c = (part.unflatten(1, (groups, d_state)) for part in (b, c))
    vectors = Mamba2Vectors(torch.randn(heads), -torch.rand(heads) - 0.1, torch.randn(heads))
    state = torch.randn(SEATS, heads, dim, d_state, generator=random)
    ours, plain = state.clone(), state.clone()
    agree(
        (cpp.mamba2_scan(ours, x, dt, b, c, z, vectors, batch), ours),
        (recurrent.mamba2_scan(plain, x, dt, b, c, z, vectors, batch), plain),
    )


@settings(deadline=None, max_examples=25)
@given(parts=PARTS, heads=st.integers(1, 3), key=st.sampled_from([1, 16, 20]), value=st.sampled_from([3, 32]))
def test_rwkv6_and_the_delta_rule(cpp, parts, heads, key, value):
    batch, random = batch_of(parts), torch.Generator().manual_seed(key)
    r, k, a = torch.randn(3, batch.num_tokens, heads, key, generator=random) * key**-0.5
    w = torch.rand(batch.num_tokens, heads, key, generator=random)
    v = torch.randn(batch.num_tokens, heads, value, generator=random)
    u = torch.randn(heads, key, generator=random)
    state = torch.randn(SEATS, heads, key, value, generator=random)
    ours, plain = state.clone(), state.clone()
    agree(
        (cpp.rwkv6_scan(ours, r, w, k, v, u, batch), ours), (recurrent.rwkv6_scan(plain, r, w, k, v, u, batch), plain)
    )
    ours, plain, b = state.clone(), state.clone(), -a * 0.5
    agree(
        (cpp.delta_scan(ours, r, w, k, v, a, b, batch), ours),
        (recurrent.delta_scan(plain, r, w, k, v, a, b, batch), plain),
    )


@settings(deadline=None, max_examples=25)
@given(parts=PARTS, d_inner=st.sampled_from([1, 40, 300]), d_state=st.sampled_from([5, 16, 32]))
def test_mamba1(cpp, parts, d_inner, d_state):
    batch, random = batch_of(parts), torch.Generator().manual_seed(d_inner)
    x, dt, z = torch.randn(3, batch.num_tokens, d_inner + 3, generator=random)[..., 1 : 1 + d_inner]
    b, c = torch.randn(2, batch.num_tokens, d_state, generator=random)
    a, d = -torch.rand(d_inner, d_state, generator=random), torch.randn(d_inner, generator=random)
    state = torch.randn(SEATS, d_inner, d_state, generator=random)
    ours, plain, dt = state.clone(), state.clone(), dt.abs()
    agree(
        (cpp.mamba1_scan(ours, x, dt, b, c, z, a, d, batch), ours),
        (recurrent.mamba1_scan(plain, x, dt, b, c, z, a, d, batch), plain),
    )


@settings(deadline=None, max_examples=25)
@given(
    parts=PARTS, key_heads=st.integers(1, 2), each=st.integers(1, 2), key=st.sampled_from([4, 16, 20]),
    value=st.sampled_from([3, 16, 40]),
)  # fmt: skip
def test_the_gated_delta_rule(cpp, parts, key_heads, each, key, value):
    batch, random, heads = batch_of(parts), torch.Generator().manual_seed(key), key_heads * each
    mixed = torch.randn(batch.num_tokens, 2 * key_heads * key + heads * value, generator=random)
    ba = torch.randn(batch.num_tokens, 2 * heads, generator=random)
    vectors = DeltaNetVectors(-torch.rand(heads, generator=random), torch.randn(heads, generator=random))
    state = torch.randn(SEATS, heads, key, value, generator=random)
    ours, plain = state.clone(), state.clone()
    agree(
        (cpp.gated_delta(ours, mixed, ba, vectors, batch, key_heads), ours),
        (TorchKernels().gated_delta(plain, mixed, ba, vectors, batch, key_heads), plain),
    )


def test_a_state_that_cannot_be_changed_in_place_is_refused(cpp):
    with pytest.raises(ValueError, match="changed in place"):
        batch, x = batch_of([(0, 1)]), torch.ones(1, 4)
        cpp.causal_convolution(torch.ones(4, 6, 3).transpose(1, 2), x, torch.ones(4, 4), None, batch)
