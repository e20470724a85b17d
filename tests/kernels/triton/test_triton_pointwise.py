"""Norm, gated activation and rope with the cache write: one pass each, quantizing as their fp32 references do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton import lang  # noqa: E402
from membound.kernels.triton.activation import QuantizedRows  # noqa: E402
from membound.kernels.triton.kv_blocks import KvBlocks  # noqa: E402
from membound.kernels.triton.launch import Config, recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402
from membound.kernels.triton.rms_norm import rms_norm, rms_norm_bytes, rms_norm_reference  # noqa: E402
from membound.kernels.triton.rope_store import (  # noqa: E402
    kv_store,
    kv_store_reference,
    rope_reference,
    rope_store,
    rope_store_bytes,
)
from membound.kernels.triton.round_rows import round_blocks, round_rows, round_rows_bytes, round_step  # noqa: E402
from membound.kernels.triton.silu_mul import silu_mul, silu_mul_bytes, silu_mul_reference  # noqa: E402

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
QUANTIZE = st.sampled_from([None, "int8", "fp8"])
# Triton's interpreter cuts bf16 off where a GPU rounds it.
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
FORMATS = ["bf16", "fp16", "fp8", "int8", "int4"]


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def matches(y, reference, dtype):
    """Halves within their rounding; quantized rows within half a step of int8, or half of e4m3's 3 mantissa bits."""
    if isinstance(y, torch.Tensor):
        return torch.allclose(y.float(), reference, rtol=ROUNDING[dtype], atol=1e-6)
    largest = reference.abs().amax(-1, keepdim=True)
    step = largest / 127 * 0.51 if y.format == "int8" else reference.abs() * 0.0626 + largest * 2.0**-17
    return torch.all((y.dequantized() - reference).abs() <= step + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 300),
    dtype=DTYPES,
    quantize=QUANTIZE,
    with_residual=st.booleans(),
)
def test_rms_norm_is_the_fp32_norm_of_the_sum_which_it_leaves_in_the_residual(
    device, tokens, width, dtype, quantize, with_residual
):
    x = random(tokens, width, dtype=dtype, device=device)
    gain = random(width, seed=1, device=device)
    residual = random(tokens, width, seed=2, dtype=dtype, device=device) if with_residual else None
    before = None if residual is None else residual.clone()
    y = rms_norm(x, gain, 1e-5, residual=residual, quantize=quantize)
    if residual is not None:
        total = before.float() + x.float()
        assert torch.allclose(residual.float(), total, rtol=ROUNDING[dtype], atol=0)
        reference = rms_norm_reference(residual, gain, 1e-5)
    else:
        reference = rms_norm_reference(x, gain, 1e-5)
    assert matches(y, reference, dtype)


def test_rms_norm_of_a_part_of_a_wider_tensor_reads_only_that_part(device):
    wide = torch.full((3, 100), torch.nan, dtype=torch.float16, device=device)
    wide[:, :40] = random(3, 40, dtype=torch.float16, device=device)
    gain = random(40, seed=1, device=device)
    y = rms_norm(wide[:, :40], gain, 1e-6)
    assert matches(y, rms_norm_reference(wide[:, :40], gain, 1e-6), torch.float16)


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(0, 5), width=st.integers(1, 1500), dtype=DTYPES, quantize=QUANTIZE)
def test_silu_mul_is_the_fp32_product(device, tokens, width, dtype, quantize):
    gate_up = random(tokens, 2 * width, dtype=dtype, device=device)
    assert matches(silu_mul(gate_up, quantize=quantize), silu_mul_reference(gate_up), dtype)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_row_of_zeros_quantizes_to_zeros(device, format):
    y = silu_mul(torch.zeros(2, 64, dtype=torch.bfloat16, device=device), quantize=format)
    assert (y.dequantized() == 0).all()


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 5),
    width=st.integers(1, 700),
    dtype=DTYPES,
    format=st.sampled_from(["int8", "fp8"]),
    in_parts=st.booleans(),
)
def test_rows_are_rounded_to_the_nearest_with_the_scale_of_their_largest(
    device, tokens, width, dtype, format, in_parts
):
    wide = random(tokens, width + 9, dtype=dtype, device=device) * torch.logspace(0, 3, tokens, device=device)[:, None]
    x = wide.to(dtype)[:, :width]
    y = round_rows(x, format, config=Config({"BLOCK": 64, "BLOCK_R": 1}) if in_parts else None)
    plain = QuantizedRows.of(x, format)
    assert torch.allclose(y.scale, plain.scale, rtol=1e-6)
    assert matches(y, x.float(), dtype)
    codes = [t.data.view(torch.int8 if format == "int8" else torch.float8_e4m3fn).float() for t in (y, plain)]
    assert ((codes[0] - codes[1]).abs() <= (1 if format == "int8" else 0.126 * codes[1].abs())).all()


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(0, 5), width=st.integers(1, 5000), dtype=DTYPES, format=st.sampled_from(["int8", "fp8"]))
def test_a_whole_step_is_rounded_with_the_scale_of_its_largest_number(device, tokens, width, dtype, format):
    wide = random(tokens, width + 9, dtype=dtype, device=device) * torch.logspace(0, 1, tokens, device=device)[:, None]
    x = wide.to(dtype)[:, :width]
    y = round_step(x, format)
    assert y.scale.shape == (1,)
    if tokens:
        plain = QuantizedRows.of_step(x, format)
        assert torch.allclose(y.scale, plain.scale, rtol=1e-6)
        assert matches(QuantizedRows(format, y.data.view(1, -1), y.scale), x.float().reshape(1, -1), dtype)
    else:
        assert float(y.scale) == 0.0


def test_a_step_of_zeros_is_rounded_to_zeros(device):
    assert (round_step(torch.zeros(3, 70, dtype=torch.bfloat16, device=device), "fp8").dequantized() == 0).all()


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(0, 3), width=st.integers(1, 1500), dtype=DTYPES)
def test_blocks_of_128_numbers_of_a_token_are_rounded_each_with_its_own_scale(device, tokens, width, dtype):
    x = random(tokens, width, dtype=dtype, device=device)
    y = round_blocks(x)
    assert y.scale.shape == (tokens, -(-width // 128)) and y.rows_a_block == 1
    largest = torch.nn.functional.pad(x.float().abs(), (0, -width % 128)).unflatten(1, (-1, 128)).amax(-1)
    assert torch.allclose(y.scale, largest / 448, rtol=1e-6)
    step = x.float().abs() * 0.0626 + largest.repeat_interleave(128, 1)[:, :width] * 2.0**-17
    assert ((y.dequantized() - x.float()).abs() <= step + 1e-9).all()


def test_a_w8a8_linear_is_one_launch_before_the_product():
    """Not the eight of plain PyTorch; a product that is split sums its parts itself."""
    from membound.kernels.gpu import TritonKernels

    kernels = TritonKernels("cpu")
    weight = kernels.pack(random(64, 256), "w8a8")
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        kernels.linear(random(2, 256, dtype=torch.bfloat16), weight)
    assert [launch.name for launch in record.launches] == ["round_rows_kernel", "linear_w8a8_kernel"]


@settings(deadline=None, max_examples=30)
@given(
    format=st.sampled_from(FORMATS),
    tokens=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 1), (9, 9)]),
    head_dim=st.sampled_from([64, 80, 6]),
    block_size=st.sampled_from([1, 5, 16]),
)
def test_rope_rotates_q_and_stores_k_and_v_as_the_cache_says(device, format, tokens, heads, head_dim, block_size):
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    kv_heads = heads[1]
    # What is turned stays below 4, from where on a step of bf16 is more than the bound below.
    qkv = random(tokens, (heads[0] + 2 * kv_heads) * head_dim, dtype=dtype, device=device).clamp(-2.8, 2.8)
    angles, order = random(50, head_dim // 2, seed=1, device=device), torch.Generator().manual_seed(2)
    positions = torch.randperm(50, generator=order)[:tokens].to(device)
    blocks = -(-8 // block_size)
    slots = torch.randperm(blocks * block_size, generator=order)[:tokens].to(device)
    slots[tokens // 2 :: 3] = -1
    stored, expected = (KvBlocks.zeros(format, blocks, block_size, kv_heads, head_dim, device) for _ in range(2))
    q = rope_store(qkv, angles.cos(), angles.sin(), positions, slots, stored)
    rotated = rope_reference(qkv.unflatten(1, (-1, head_dim)), angles.cos(), angles.sin(), positions)
    raw_v = qkv.unflatten(1, (-1, head_dim))[:, heads[0] + kv_heads :]
    assert torch.allclose(q.float(), rotated[:, : heads[0]], rtol=ROUNDING[dtype], atol=1e-3)
    kv_store_reference(rotated[:, heads[0] : heads[0] + kv_heads], raw_v, slots, expected)
    for mine, theirs in zip(stored.dequantized(), expected.dequantized(), strict=True):
        step = {"bf16": 0.02, "fp16": 0.003, "fp8": 0.3, "int8": 0.04, "int4": 0.4}[format]
        assert (mine - theirs).abs().max() <= step  # a step where a rounding falls on the other side


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_stored_reads_back_within_half_a_step_and_no_other_slot_changes(device, format):
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    kv = KvBlocks.zeros(format, 3, 4, 2, 64, device)
    slots = torch.tensor([11, 0, 5], device=device)
    k, v = (random(3, 2, 64, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    kv_store(k, v, slots, kv)
    k_read, v_read = (blocks.flatten(0, 1)[slots] for blocks in kv.dequantized())
    for values, read in ((k, k_read), (v, v_read)):
        largest = float(values.float().abs().max())
        allowed = {"bf16": 0, "fp16": 0, "fp8": largest / 16, "int8": largest / 127 * 0.52, "int4": largest / 15 * 1.04}
        assert (values.float() - read).abs().max() <= allowed[format]
    others = torch.ones(12, dtype=torch.bool, device=device)
    others[slots] = False
    assert (kv.k.flatten(0, 1)[others] == 0).all()


def test_every_e4m3_survives_being_widened_and_rounded_and_halves_round_as_torch_does(device):
    import triton
    import triton.language as tl

    @triton.jit
    def narrow(x, y, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(y + at, lang.fp8_from(tl.load(x + at)))

    codes = torch.arange(256, dtype=torch.uint8, device=device)
    exact = codes.view(torch.float8_e4m3fn).float()
    ties = torch.cat([exact[:126] + exact[1:127], -(exact[:126] + exact[1:127])])[:252] / 2  # even ones win
    values = torch.cat([exact.nan_to_num(0.0), ties, random(516, device=device) * 10, torch.zeros(0, device=device)])
    y = torch.empty(1024, dtype=torch.uint8, device=device)
    narrow[(1,)](values, y, SIZE=1024)
    assert torch.equal(y.view(torch.float8_e4m3fn).float(), values.to(torch.float8_e4m3fn).float())


def test_declared_bytes_count_every_operand_once(device):
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    assert rms_norm_bytes(x, residual=False, quantized=False) == 4 * 64 * (2 + 2)
    assert rms_norm_bytes(x, residual=True, quantized=True) == 4 * 64 * (2 + 2 + 2 + 1) + 4 * 4
    assert silu_mul_bytes(x, quantized=False) == 4 * (64 + 32) * 2
    assert silu_mul_bytes(x, quantized=True) == 4 * (64 * 2 + 32 + 4)
    kv = KvBlocks.zeros("int8", 1, 4, 1, 16, device)
    qkv = torch.zeros(4, 4 * 16, dtype=torch.bfloat16, device=device)
    assert rope_store_bytes(qkv, kv) == 4 * (64 * 2 + 32 * 2 + 2 * (16 + 2) + 2 * 8 * 4)
    assert QuantizedRows.of(x, "int8").nbytes == 4 * (64 + 4)
    assert round_rows_bytes(x, round_rows(x, "int8")) == 4 * (64 * 2 + 64 + 4)
    assert round_rows_bytes(x, round_blocks(x)) == 4 * (64 * 2 + 64 + 4)


def test_bad_arguments_are_named(device):
    x = random(2, 64, dtype=torch.bfloat16, device=device)
    gain = random(64, device=device)
    for wrong in (x.float(), x[None], x[:, ::2]):
        with pytest.raises(ValueError, match=r"^x: "):
            rms_norm(wrong, gain, 1e-5)
    with pytest.raises(ValueError, match=r"^weight: shape is \[32\]"):
        rms_norm(x, gain[:32], 1e-5)
    with pytest.raises(ValueError, match=r"^residual: dtype"):
        rms_norm(x, gain, 1e-5, residual=x.float())
    for wrong in (x.long(), x[None], x[:, ::2]):
        for rounded in (round_blocks, lambda rows: round_rows(rows, "fp8")):
            with pytest.raises(ValueError, match=r"^x: "):
                rounded(wrong)
    with pytest.raises(ValueError, match=r"^gate_up: has 63 columns"):
        silu_mul(x[:, :63])
    kv = KvBlocks.zeros("bf16", 1, 4, 2, 16, device)
    table, longs = random(9, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^qkv: 64 columns hold no q"):
        rope_store(x, table, table, longs, longs, kv)
    with pytest.raises(ValueError, match=r"^slots: dtype"):
        rope_store(torch.cat([x, x], 1), table, table, longs, longs.int(), kv)
