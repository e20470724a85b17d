"""Weight-only linears: the fp32 product with the dequantized weight, whatever the shape and however k is split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import PackedWeight  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.triton import last, widen  # noqa: E402
from membound.kernels.triton.launch import Config, recording  # noqa: E402
from membound.kernels.triton.linear_byte import (  # noqa: E402
    ByteWeight,
    linear_byte,
    linear_byte_reference,
)
from membound.kernels.triton.linear_half import (  # noqa: E402
    MOST_ROWS,
    MOST_TOKENS,
    linear_half,
    linear_half_reference,
)
from membound.kernels.triton.linear_int4 import (  # noqa: E402
    Int4Weight,
    linear_int4,
    linear_int4_reference,
)
from membound.kernels.triton.machine import REFERENCE_MACHINES, machine_of  # noqa: E402
from membound.kernels.triton.moved import weight_only_bytes  # noqa: E402

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
# Of the result; products and sums are in fp32. Triton's interpreter cuts bf16 off where a GPU rounds it.
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-11}
SPLITS = st.sampled_from([None, 1, 2, 3])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(y, reference):
    return torch.allclose(y.float(), reference, rtol=ROUNDING[y.dtype], atol=2e-5 * float(reference.abs().max() + 1))


def moved(weight, device):
    fields = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in vars(weight).items()}
    return type(weight)(**fields)


@settings(deadline=None, max_examples=25)
@given(
    m=st.integers(1, 19),
    n=st.integers(1, 140),
    groups=st.sampled_from([1, 2, 3, 5, 9]),
    group=st.sampled_from([32, 64, 128, 256]),
    symmetric=st.booleans(),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_int4_weights_give_the_product_with_what_their_nibbles_mean(
    device, m, n, groups, group, symmetric, dtype, splits
):
    weight = moved(Int4Weight.quantize(random(n, groups * group), group, symmetric=symmetric), device)
    x = random(m, groups * group, seed=1).to(device, dtype)
    y = linear_int4(x, weight, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16}))
    assert close(y, linear_int4_reference(x, weight))


@settings(deadline=None, max_examples=25)
@given(
    format=st.sampled_from(["int8", "fp8"]),
    m=st.integers(1, 19),
    n=st.integers(1, 70),
    k=st.integers(1, 150) | st.sampled_from([64, 128]),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_weights_of_a_byte_give_the_product_with_what_their_bytes_mean(device, format, m, n, k, dtype, splits):
    weight = moved(ByteWeight.quantize(random(n, k), format), device)
    x = random(m, k, seed=1).to(device, dtype)
    y = linear_byte(x, weight, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16, "BLOCK_K": 32}))
    assert close(y, linear_byte_reference(x, weight))


@settings(deadline=None, max_examples=20)
@given(
    m=st.integers(1, 19),
    n=st.integers(1, 70),
    k=st.integers(1, 150) | st.sampled_from([64, 128]),
    dtype=DTYPES,
    splits=SPLITS,
)
def test_halves_of_few_tokens_give_the_product(device, m, n, k, dtype, splits):
    weight, x = random(n, k).to(device, dtype), random(m, k, seed=1).to(device, dtype)
    y = linear_half(x, weight, splits=splits, config=Config({"BLOCK_N": 32, "BLOCK_M": 16, "BLOCK_K": 32}))
    assert close(y, linear_half_reference(x, weight))


def test_a_product_in_parts_is_the_same_each_time_and_leaves_no_count(device):
    """The last program of a tile adds the parts up, in their order, and the next product counts from zero again."""
    weight, x = random(100, 512).to(device, torch.bfloat16), random(20, 512, seed=1).to(device, torch.bfloat16)
    config = Config({"BLOCK_N": 32, "BLOCK_M": 16, "BLOCK_K": 32})
    first, again = (linear_half(x, weight, splits=5, config=config) for _ in range(2))
    assert torch.equal(first, again) and close(first, linear_half_reference(x, weight))
    assert (last.counters_of(x) == 0).all()


def test_a_few_tokens_times_a_narrow_matrix_take_the_own_kernel_and_others_the_library(device):
    kernels = TritonKernels(str(device))
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        for m, n in ((1, 64), (MOST_TOKENS, 64), (MOST_TOKENS + 1, 64), (1, MOST_ROWS + 1)):
            weight = kernels.pack(torch.zeros(n, 32, device=device), "bf16")
            x = torch.zeros(m, 32, dtype=torch.bfloat16, device=device)
            kernels.linear(x, weight)
            kernels.linear(x[None], weight)
            kernels.linear(x.repeat(1, 2)[:, ::2], weight)
            kernels.linear(x, PackedWeight("bf16", weight.data.repeat(1, 2)[:, :32]))
    assert [(launch.name, launch.arguments[0].shape[0]) for launch in record.launches] == [
        ("linear_half_kernel", 1),
        ("linear_half_kernel", MOST_TOKENS),
    ]


@pytest.mark.parametrize("m", [1, 20, 40, 70])
def test_the_stored_configuration_of_every_batch_size_gives_the_same(device, m):
    dense, x = random(130, 256), random(m, 256, seed=1).to(device, torch.bfloat16)
    weight = moved(Int4Weight.quantize(dense, 128, symmetric=False), device)
    assert close(linear_int4(x, weight), linear_int4_reference(x, weight))
    weight = moved(ByteWeight.quantize(dense, "int8"), device)
    assert close(linear_byte(x, weight), linear_byte_reference(x, weight))


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 70),
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128, 256]),
    symmetric=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_quantizing_to_int4_errs_by_half_a_step_and_packing_loses_nothing(n, groups, group, symmetric, size):
    dense = size * random(n, groups * group)
    weight = Int4Weight.quantize(dense, group, symmetric=symmetric)
    scale = weight.scale.transpose(0, 1).reshape(n, -1)[:, :groups]
    step = scale.float().repeat_interleave(group, dim=1)
    # The scale is rounded to bf16 and the zero point to a whole number, so the ends of the range may be cut a little.
    assert ((weight.dequantized() - dense).abs() <= (0.5 if symmetric else 1.0) * step * 1.04).all()
    assert weight.shape == (n, groups * group)


def test_int4_holds_a_matrix_of_its_own_numbers_exactly():
    q = torch.randint(0, 16, (65, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    zero = torch.randint(0, 16, (65, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = random(65, 2).abs().bfloat16()
    weight = Int4Weight.pack(q, scale, zero)
    by_column = [t.float().repeat_interleave(128, dim=1) for t in (zero, scale)]
    assert torch.equal(weight.dequantized(), (q.float() - by_column[0]) * by_column[1])


def test_every_finite_e4m3_is_widened_exactly(device):
    import triton
    import triton.language as tl

    @triton.jit
    def widened(x, y, WIDEN: tl.constexpr):
        at = tl.arange(0, 256)
        tl.store(y + at, widen.fp8_to(tl.load(x + at), tl.bfloat16, WIDEN))

    codes = torch.arange(256, dtype=torch.uint8, device=device)
    y = torch.empty(256, dtype=torch.bfloat16, device=device)
    widened[(1,)](codes, y, WIDEN=machine_of(device).widening)
    exact = codes.view(torch.float8_e4m3fn).float()
    finite = exact.isfinite()
    assert torch.equal(y.float()[finite], exact[finite])


def test_declared_bytes_are_the_weight_x_and_y():
    int8 = ByteWeight.quantize(random(48, 64), "int8")
    assert weight_only_bytes(3, int8) == 48 * 64 + 48 * 4 + 3 * (48 + 64) * 2
    int4 = Int4Weight.quantize(random(48, 1024), 128, symmetric=False)
    assert weight_only_bytes(3, int4) == 48 * 1024 / 2 + 48 * 8 * 2.5 + 3 * (48 + 1024) * 2


def test_bad_arguments_are_named(device):
    x = random(2, 64).to(device, torch.bfloat16)
    int4 = moved(Int4Weight.quantize(random(8, 64), 64, symmetric=True), device)
    int8 = moved(ByteWeight.quantize(random(8, 64), "int8"), device)
    for linear, weight in ((linear_int4, int4), (linear_byte, int8)):
        for wrong in (x.float(), x[:, :32], x.t(), x[None]):
            with pytest.raises(ValueError, match=r"^x: "):
                linear(wrong, weight)
    with pytest.raises(ValueError, match=r"^weight\.scale: dtype is torch\.float32"):
        linear_int4(x, Int4Weight(int4.data, int4.scale.float(), None))
    with pytest.raises(ValueError, match=r"^weight\.data: dtype"):
        linear_byte(x, ByteWeight("fp8", int8.data, int8.scale))
    with pytest.raises(ValueError, match=r"^group: 48 does not divide"):
        Int4Weight.quantize(random(8, 64), 48, symmetric=True)
