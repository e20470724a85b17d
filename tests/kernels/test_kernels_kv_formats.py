"""Quantized K and V: stored within half a step, and attended to exactly as they are stored."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels.kv_formats import QuantizedKv  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402

FORMATS = st.sampled_from(["fp8", "int8", "int4"])
SEQUENCES = st.lists(
    st.one_of(st.tuples(st.just(1), st.sampled_from([1, 64, 65, 300])), st.integers(1, 40).map(lambda n: (n, n + 5))),
    min_size=1,
    max_size=3,
)


def filled(format, step, head_dim, kv_heads):
    """A cache in `format` with the step's K and V at every slot in use; the rest is whatever it is."""
    kv = QuantizedKv.zeros(format, *step.k_blocks.shape[:3], head_dim)
    if format == "fp8":
        kv.scales.copy_(torch.rand(kv.scales.shape, generator=torch.Generator().manual_seed(3)) + 0.01)
    used = (~step.k_blocks.float().isnan()).flatten(2).any(-1).flatten().nonzero().flatten()
    k, v = (b.view(-1, kv_heads, head_dim)[used] for b in (step.k_blocks, step.v_blocks))
    kv.store(k, v, used)
    return kv


@settings(deadline=None, max_examples=15)
@given(
    format=FORMATS,
    sequences=SEQUENCES,
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    head_dim=st.sampled_from([2, 16, 20, 64, 80, 128]),
)
def test_quantized_blocks_are_read_as_the_numbers_that_they_stand_for(
    cpp, make_step, format, sequences, heads, head_dim
):
    step = make_step(sequences, heads[1], head_dim, 16)
    kv = filled(format, step, head_dim, heads[1])
    q = torch.randn(step.batch.num_tokens, heads[0], head_dim, generator=torch.Generator().manual_seed(1))
    reference = TorchKernels()
    for options in ({}, {"window": 30}, {"softcap": 3.0}):
        y = cpp.attention_quantized(q, kv, step.batch, head_dim**-0.5, **options)
        expected = reference.attention_quantized(q, kv, step.batch, head_dim**-0.5, **options)
        assert (y - expected).abs().max() < 5e-5
    received = cpp.attention_scores(q, kv, step.batch, head_dim**-0.5, queries=3)
    expected = reference.attention_scores(q, kv, step.batch, head_dim**-0.5, queries=3)
    assert (received - expected).abs().max() < 1e-5


@settings(deadline=None, max_examples=15)
@given(
    format=FORMATS,
    sequences=SEQUENCES,
    head_dim=st.sampled_from([2, 16, 20, 64]),
    power=st.integers(-6, 6),
)
def test_stored_numbers_are_off_by_half_a_step_at_most(kernels, make_step, format, sequences, head_dim, power):
    step = make_step(sequences, 2, head_dim, 16)
    kv = QuantizedKv.zeros(format, *step.k_blocks.shape[:3], head_dim)
    random = torch.Generator().manual_seed(2)
    tokens = step.batch.num_tokens
    qkv = torch.randn(tokens, (4 + 2 * 2) * head_dim, generator=random) * 2.0**power
    qkv[0] = 0
    angle = torch.rand(400, head_dim // 2, generator=random) * 6
    where = (angle.cos(), angle.sin(), step.batch)
    q = kernels.rope_and_store_quantized(qkv, *where, kv)
    # The bf16 store is tested against the definition; here its stored numbers are fp32.
    k_exact, v_exact = (torch.zeros(*step.k_blocks.shape) for _ in range(2))
    expected_q = TorchKernels().rope_and_store(qkv, *where, k_exact, v_exact)
    assert torch.allclose(q, expected_q, atol=1e-5 * 2.0**power)
    for part, (stored, exact) in enumerate(zip(kv.dequantized(), (k_exact, v_exact), strict=True)):
        stored, exact = (t.view(-1, 2, head_dim)[step.batch.slots] for t in (stored, exact))
        if format == "fp8":  # three bits of mantissa; 2^-10 is half the smallest step
            bound = exact.abs() * 2**-4 + 2**-10
        else:
            column = part if format == "int8" else 2 * part
            scale = kv.scales.transpose(1, 2).reshape(-1, 2, kv.scales.shape[-1])[step.batch.slots][..., column]
            # fp16 rounds the scale (2^-11 of up to 127 steps) and int4's minimum.
            bound = scale.float()[..., None] * (0.5 + 127 * 2**-11) + exact.abs().amax(-1, keepdim=True) * 2**-10
            bound = bound + 2**-23
        assert ((stored - exact).abs() <= bound).all()


@pytest.mark.parametrize(("format", "share"), [("fp8", 1 / 2), ("int8", 1 / 2 + 1 / 64), ("int4", 1 / 4 + 1 / 32)])
def test_a_quantized_cache_takes_its_share_of_bf16s_bytes(format, share):
    kv = QuantizedKv.zeros(format, 100, 16, 2, 64)
    per_head = 4 * 2 * 2 if format == "fp8" else 0
    assert kv.nbytes == 100 * 16 * 2 * 64 * 2 * 2 * share + per_head


def test_new_scales_of_the_same_blocks_are_used(cpp, make_step):
    step = make_step([(1, 20)], 1, 16, 16)
    kv = filled("fp8", step, 16, 1)
    q = torch.randn(1, 1, 16)
    before = cpp.attention_quantized(q, kv, step.batch, 0.25)
    rescaled = QuantizedKv("fp8", kv.k, kv.v, kv.scales * torch.tensor([[1.0], [2.0]]))
    assert torch.allclose(cpp.attention_quantized(q, rescaled, step.batch, 0.25), 2 * before)


def test_formats_and_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="format: is int3"):
        QuantizedKv.zeros("int3", 1, 16, 1, 16)
    with pytest.raises(ValueError, match="head_dim: is 15"):
        QuantizedKv.zeros("int4", 1, 16, 1, 15)
