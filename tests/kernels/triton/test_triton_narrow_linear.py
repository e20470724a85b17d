"""MXFP4, 2:4 sparse and byte-by-byte linears: the fp32 product with what their bits mean."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import PackedWeight  # noqa: E402
from membound.kernels.bench.trial import FP8_SUMS  # noqa: E402
from membound.kernels.quantize import rounded_inputs  # noqa: E402
from membound.kernels.triton import lang, widen  # noqa: E402
from membound.kernels.triton.activation import QuantizedRows  # noqa: E402
from membound.kernels.triton.launch import Config  # noqa: E402
from membound.kernels.triton.linear_byte import ByteWeight  # noqa: E402
from membound.kernels.triton.linear_int4 import Int4Weight  # noqa: E402
from membound.kernels.triton.linear_int8 import (  # noqa: E402
    Int8Weight,
    linear_int8,
    linear_int8_reference,
)
from membound.kernels.triton.linear_mxfp4 import (  # noqa: E402
    Mxfp4Weight,
    linear_mxfp4,
    linear_mxfp4_reference,
)
from membound.kernels.triton.linear_sparse import (  # noqa: E402
    SparseWeight,
    linear_sparse,
    linear_sparse_reference,
)
from membound.kernels.triton.linear_w4a8 import (  # noqa: E402
    linear_w4a8,
    linear_w4a8_reference,
    step_of,
)
from membound.kernels.triton.linear_w8a8 import (  # noqa: E402
    Fp8Blocks,
    linear_fp8_blocks,
    linear_fp8_blocks_reference,
    linear_w8a8,
    linear_w8a8_reference,
)
from membound.kernels.triton.machine import machine_of  # noqa: E402
from membound.kernels.triton.moved import rounded_bytes, weight_only_bytes  # noqa: E402
from membound.kernels.triton.round_rows import round_steps  # noqa: E402

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
# Of the result; products and sums are in fp32. Triton's interpreter cuts bf16 off where a GPU rounds it.
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
E2M1_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SPLITS = st.sampled_from([None, 1, 2, 3])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(y, reference, fp8=False):
    # Tensor cores add products of fp8 in fewer bits than fp32's, which the interpreter does not.
    share = FP8_SUMS if fp8 and y.is_cuda else 2e-5
    return torch.allclose(y.float(), reference, rtol=ROUNDING[y.dtype], atol=share * float(reference.abs().max() + 1))


def moved(weight, device):
    fields = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in vars(weight).items()}
    return type(weight)(**fields)


@settings(deadline=None, max_examples=20)
@given(
    m=st.integers(0, 19),
    n=st.integers(1, 70),
    groups=st.integers(1, 9),
    group=st.sampled_from([32, 64, 128]),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_int8_in_groups_gives_the_product_with_what_its_codes_mean(device, m, n, groups, group, dtype, splits):
    sizes = torch.logspace(-2, 1, groups * group)  # so that scales differ much from group to group
    weight = moved(Int8Weight.quantize(random(n, groups * group) * sizes, group), device)
    x = (random(m, groups * group, seed=1) / sizes).to(device, dtype)
    y = linear_int8(x, weight, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16}))
    assert y.shape == (m, n)
    if m:
        assert close(y, linear_int8_reference(x, weight))
        assert weight_only_bytes(m, weight) == weight.nbytes + 2 * m * (n + groups * group)


def test_int8_keeps_the_codes_and_scales_that_it_is_given():
    codes = torch.randint(-128, 128, (70, 192), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(70, 6, generator=torch.Generator().manual_seed(1)).half()
    exact = codes.float() * scale.float().repeat_interleave(32, 1)
    assert torch.equal(Int8Weight.pack(codes, scale).dequantized(), exact)
    with pytest.raises(ValueError, match=r"^scale: 3 groups of 288 columns are not groups of 32, 64, 128"):
        Int8Weight.pack(torch.zeros(4, 288, dtype=torch.int8), torch.zeros(4, 3, dtype=torch.float16))


@settings(deadline=None, max_examples=15)
@given(m=st.integers(1, 19), n=st.integers(1, 40), k=st.integers(1, 70), format=st.sampled_from(["int8", "fp8"]))
def test_one_scale_for_all_tokens_multiplies_every_row(device, m, n, k, format):
    x = moved(QuantizedRows.of_step(random(m, k, seed=1) * torch.logspace(-2, 1, m)[:, None], format), device)
    weight = moved(ByteWeight.quantize(random(n, k), format), device)
    y = linear_w8a8(x, weight, torch.bfloat16, config=Config({"BLOCK_N": 32, "BLOCK_M": 16, "BLOCK_K": 32}))
    assert close(y, linear_w8a8_reference(x, weight), fp8=format == "fp8")


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 19), n=st.integers(1, 70), groups=st.integers(1, 7), splits=SPLITS)
def test_mxfp4_weights_give_the_product_with_what_their_nibbles_mean(device, m, n, groups, splits):
    sizes = torch.logspace(-6, 6, groups * 32)  # so that scales differ much from group to group
    weight = moved(Mxfp4Weight.quantize(random(n, groups * 32) * sizes), device)
    x = (random(m, groups * 32, seed=1) / sizes).to(device, torch.bfloat16)
    y = linear_mxfp4(x, weight, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16, "STEP": 2}))
    assert close(y, linear_mxfp4_reference(x, weight))


def test_mxfp4_holds_its_own_numbers_exactly_and_rounds_others_to_the_nearest():
    code = torch.randint(0, 16, (65, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.randint(110, 140, (65, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    numbers = E2M1_NUMBERS[code.long()]
    exact = numbers * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(Mxfp4Weight.pack(code, scale).dequantized(), exact)
    dense = random(5, 96)
    largest = dense.view(5, 3, 32).abs().amax(-1).repeat_interleave(32, 1)
    # The widest gaps are 2 of a scale of which the largest element is 4 to 8: half a gap, or what 6 cuts off of 8.
    assert ((Mxfp4Weight.quantize(dense).dequantized() - dense).abs() <= largest / 4).all()


def test_every_mxfp4_number_is_unpacked_exactly_whatever_its_scale(device):
    import triton
    import triton.language as tl

    @triton.jit
    def unpack(x, scale, y, WIDEN: tl.constexpr):
        at = tl.arange(0, 256)
        power = lang.power_of_two(tl.load(scale + at).to(tl.int32))
        low = widen.e2m1_to_bf16(tl.load(x + at), False, WIDEN)
        high = widen.e2m1_to_bf16(tl.load(x + at), True, WIDEN)
        tl.store(y + at, low.to(tl.float32) * power)
        tl.store(y + 256 + at, high.to(tl.float32) * power)

    byte = torch.arange(256, device=device).to(torch.uint8)
    code = torch.cat([byte & 0xF, byte >> 4])
    scale = torch.arange(256, device=device).clamp(1, 252).flip(0).to(torch.uint8)  # whose products are normal fp32
    y = torch.empty(512, device=device)
    unpack[(1,)](byte, scale, y, WIDEN=machine_of(device).widening)
    scale = scale.repeat(2)
    exact = E2M1_NUMBERS.to(device)[code.long()] * torch.exp2(scale.double() - 127)
    assert torch.equal(y.double(), exact)


@settings(deadline=None, max_examples=20)
@given(
    m=st.integers(1, 19), n=st.integers(1, 40), k=st.sampled_from([4, 60, 256, 300, 516]), dtype=DTYPES, splits=SPLITS
)
def test_2_of_4_weights_give_the_product_with_the_zeros_between_them(device, m, n, k, dtype, splits):
    weight = moved(SparseWeight.prune(random(n, k).to(dtype)), device)
    x = random(m, k, seed=1).to(device, dtype)
    y = linear_sparse(x, weight, splits=splits, config=Config({"BLOCK_N": 16, "BLOCK_M": 16}))
    assert close(y, linear_sparse_reference(x, weight))


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 9), k=st.sampled_from([4, 60, 256, 516]))
def test_pruning_keeps_the_two_largest_of_four_where_they_were_and_what_is_sparse_already(n, k):
    dense = random(n, k).bfloat16()
    pruned = SparseWeight.prune(dense).dequantized()
    groups, kept = dense.float().view(n, -1, 4), pruned.view(n, -1, 4)
    assert (kept != 0).sum(-1).eq(2).all()
    assert torch.equal(kept[kept != 0], groups[kept != 0])
    assert torch.allclose(kept.abs().sum(-1), groups.abs().sort(dim=-1).values[..., 2:].sum(-1))
    assert torch.equal(SparseWeight.prune(pruned.bfloat16()).dequantized(), pruned)


def test_2_of_4_weights_take_nine_sixteenths_of_the_bytes_of_the_dense_ones():
    weight = SparseWeight.prune(random(16, 512).bfloat16())
    assert weight.nbytes == 16 * 512 * 2 * 9 / 16
    assert weight_only_bytes(3, weight) == weight.nbytes + 3 * (16 + 512) * 2


@settings(deadline=None, max_examples=25)
@given(
    format=st.sampled_from(["int8", "fp8"]),
    m=st.integers(1, 19),
    n=st.integers(1, 40),
    k=st.integers(1, 150) | st.sampled_from([64, 128]),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_bytes_times_bytes_give_the_product_of_what_both_mean(device, format, m, n, k, dtype, splits):
    weight = moved(ByteWeight.quantize(random(n, k), format), device)
    x = QuantizedRows.of(random(m, k, seed=1).to(device), format)
    y = linear_w8a8(x, weight, dtype, splits=splits, config=Config({"BLOCK_N": 16, "BLOCK_M": 16, "BLOCK_K": 32}))
    assert close(y, linear_w8a8_reference(x, weight), format == "fp8")


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 19),
    n=st.sampled_from([1, 40, 130]),
    group=st.sampled_from([64, 128, 256]),
    groups=st.integers(1, 10),
    symmetric=st.booleans(),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_4_bits_times_8_give_the_product_of_what_both_mean(device, m, n, group, groups, symmetric, dtype, splits):
    k = group * groups
    sizes = torch.logspace(-1, 1, k)  # so that the groups' scales differ
    weight = moved(Int4Weight.quantize(random(n, k) * sizes, group, symmetric=symmetric, lanes=2), device)
    x = round_steps((random(m, k, seed=1) * sizes.flip(0)).to(device, dtype), step_of(group))
    y = linear_w4a8(x, weight, dtype, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16}))
    assert close(y, linear_w4a8_reference(x, weight))
    assert close(linear_w4a8(x, weight, dtype), linear_w4a8_reference(x, weight))


@settings(deadline=None, max_examples=20)
@given(m=st.integers(0, 5), step=st.sampled_from([32, 64, 128]), steps=st.integers(1, 9), dtype=DTYPES)
def test_steps_of_a_token_are_rounded_as_w4a8_means_it(device, m, step, steps, dtype):
    x = random(m, step * steps).to(device, dtype)
    meant = rounded_inputs(x, PackedWeight("w4a8", x, group_size=step))
    found = round_steps(x, step)
    # A number halfway between two codes may become either.
    code = found.scale.repeat_interleave(step, 1)
    assert ((found.dequantized() - meant).abs() <= 1.01 * code).all()
    assert ((found.dequantized() - meant).abs() <= 1e-6 * code).float().mean() > 0.98 if m else True


@settings(deadline=None, max_examples=15)
@given(m=st.integers(1, 19), n=st.sampled_from([1, 100, 130]), k=st.sampled_from([128, 130, 300]), splits=SPLITS)
def test_fp8_blocks_give_the_product_with_every_blocks_own_scale(device, m, n, k, splits):
    sizes = torch.logspace(-2, 2, k)  # so that the blocks' scales differ
    weight = moved(Fp8Blocks.quantize(random(n, k) * sizes, 128), device)
    x = moved(Fp8Blocks.quantize(random(m, k, seed=1) * sizes.flip(0), 1), device)
    config = Config({"BLOCK_N": 32, "BLOCK_M": 16})
    y = linear_fp8_blocks(x, weight, torch.bfloat16, splits=splits, config=config)
    assert close(y, linear_fp8_blocks_reference(x, weight), fp8=True)
    halves = torch.randn(m, k + 8, device=device).bfloat16()[:, :k]
    y = linear_fp8_blocks(halves, weight, torch.bfloat16, splits=splits, config=config)
    assert close(y, linear_fp8_blocks_reference(halves, weight))


@pytest.mark.parametrize("m", [1, 70])
def test_the_stored_configurations_give_the_same(device, m):
    dense, x = random(130, 256), random(m, 256, seed=1).to(device, torch.bfloat16)
    mxfp4, sparse = moved(Mxfp4Weight.quantize(dense), device), moved(SparseWeight.prune(dense.bfloat16()), device)
    assert close(linear_mxfp4(x, mxfp4), linear_mxfp4_reference(x, mxfp4))
    assert close(linear_sparse(x, sparse), linear_sparse_reference(x, sparse))
    rows, weight = QuantizedRows.of(x, "int8"), moved(ByteWeight.quantize(dense, "int8"), device)
    assert close(linear_w8a8(rows, weight, torch.bfloat16), linear_w8a8_reference(rows, weight))
    blocks, weight = Fp8Blocks.quantize(x, 1), moved(Fp8Blocks.quantize(dense, 128), device)
    y = linear_fp8_blocks(blocks, weight, torch.bfloat16)
    assert close(y, linear_fp8_blocks_reference(blocks, weight), fp8=True)


def test_declared_bytes_count_weights_scales_and_activations_once(device):
    int4, x = (
        Int4Weight.quantize(random(64, 256), 128, symmetric=True, lanes=2),
        round_steps(random(3, 256).to(device), 128),
    )
    assert rounded_bytes(x, int4) == 64 * 128 + 64 * 2 * 2 + 3 * (256 + 2 * 4) + 3 * 64 * 2
    mxfp4 = Mxfp4Weight.quantize(random(48, 64))
    assert weight_only_bytes(3, mxfp4) == 48 * 64 * (4 + 8 / 32) / 8 + 3 * (48 + 64) * 2
    rows, weight = QuantizedRows.of(random(3, 64), "int8"), ByteWeight.quantize(random(48, 64), "int8")
    assert rounded_bytes(rows, weight) == 48 * (64 + 4) + 3 * (64 + 4) + 3 * 48 * 2
    x, blocks = Fp8Blocks.quantize(random(3, 256), 1), Fp8Blocks.quantize(random(130, 256), 128)
    assert rounded_bytes(torch.zeros(3, 256).half(), blocks) == 130 * 256 + 4 * 4 + 3 * (256 + 130) * 2
    assert rounded_bytes(x, blocks) == 130 * 256 + 4 * 4 + 3 * (256 + 2 * 4) + 3 * 130 * 2


def test_bad_arguments_are_named(device):
    x = random(2, 64).to(device, torch.bfloat16)
    mxfp4 = moved(Mxfp4Weight.quantize(random(8, 64)), device)
    sparse = moved(SparseWeight.prune(random(8, 64).bfloat16()), device)
    for linear, weight in ((linear_mxfp4, mxfp4), (linear_sparse, sparse)):
        for wrong in (x.float(), x[:, :32], x[None]):
            with pytest.raises(ValueError, match=r"^x: "):
                linear(wrong, weight)
    with pytest.raises(ValueError, match=r"^weight\.values: dtype"):
        linear_sparse(x.half(), sparse)
    with pytest.raises(ValueError, match=r"^weight: 6 columns are not groups of 4"):
        SparseWeight.prune(random(2, 6).half())
    rows, weight = QuantizedRows.of(x, "int8"), moved(ByteWeight.quantize(random(8, 64), "fp8"), device)
    with pytest.raises(ValueError, match=r"^x\.format: is int8, the weight's is fp8"):
        linear_w8a8(rows, weight, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^dtype: is torch\.float32"):
        linear_w8a8(QuantizedRows.of(x, "fp8"), weight, torch.float32)
    int4 = moved(Int4Weight.quantize(random(8, 64), 64, symmetric=True, lanes=2), device)
    steps = round_steps(x, 64)
    with pytest.raises(ValueError, match=r"^weight\.data: dtype is torch\.int16, should be torch\.uint8"):
        linear_w4a8(steps, moved(Int4Weight.quantize(random(8, 64), 64, symmetric=True), device), torch.bfloat16)
    with pytest.raises(ValueError, match=r"^x\.step: is 32, for groups of 64 it should be 64"):
        linear_w4a8(round_steps(x, 32), int4, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weight: has groups of 32"):
        narrow = moved(Int4Weight.quantize(random(8, 64), 32, symmetric=True), device)
        linear_w4a8(steps, narrow, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^step: is 48 for rows of 64"):
        round_steps(x, 48)
    with pytest.raises(ValueError, match=r"^x: dtype is torch\.float32"):
        linear_fp8_blocks(x.float(), moved(Fp8Blocks.quantize(x, 128), device), torch.bfloat16)
    with pytest.raises(ValueError, match=r"^weight\.rows_a_block: is 1, should be 128"):
        linear_fp8_blocks(Fp8Blocks.quantize(x, 1), Fp8Blocks.quantize(x, 1), torch.bfloat16)
