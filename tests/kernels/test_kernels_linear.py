"""Linear layers: right to fp32 rounding, and the same bits for a row in any batch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from membound.kernels.cpu.kernels import CpuKernels  # noqa: E402
from membound.kernels.cpu.linear import BF16_FORMATS  # noqa: E402
from membound.kernels.quantize import dequantize  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402

EXACT = ("fp32", "bf16", "fp8", "sparse24")  # multiplied in fp32
CODED = ("int8", "int4", "int3", "int2")  # multiplied in integers, x rounded to 16 bits
EIGHT_BIT_INPUTS = ("w8a8", "w4a8")
FORMATS = st.sampled_from([*EXACT, *CODED])
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 257, 1024, 1025, 2100]))
SMALLEST_WIDTH = {"sparse24": 16, "int4": 32, "w4a8": 32, "int3": 32, "int2": 32}


@pytest.fixture(scope="module")
def bf16_cpp(cpp):
    """The kernels as a run has them, where the processor has units for bf16."""
    kernels = CpuKernels()
    if "tokens in bf16" not in kernels.describe():
        pytest.skip("no AVX512-BF16")
    return kernels


def problem(m, n, k, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=random), torch.randn(n, k, generator=random)


def wide_enough(k, format):
    """k as a multiple of what the format needs."""
    return -(-k // SMALLEST_WIDTH.get(format, 1)) * SMALLEST_WIDTH.get(format, 1)


@settings(deadline=None, max_examples=80)
@given(m=st.integers(1, 70), n=st.integers(1, 50), k=WIDTHS, format=FORMATS, seed=st.integers(0, 99))
def test_linear_is_the_fp64_product_of_the_packed_weight_up_to_its_rounding(cpp, m, n, k, format, seed):
    x, w = problem(m, n, wide_enough(k, format), seed)
    weight = cpp.pack(w, format)
    dense = dequantize(weight).double()
    exact = x.double() @ dense.T
    # Each of the k / lanes + lanes additions rounds once; k * eps bounds any order of them.
    bound = 2 * (k + 2) * 2**-24 * (x.double().abs() @ dense.abs().T) + 1e-30
    if format in CODED:
        # x is off by half a step; offsets and codes are summed apart, so what cancels counts too.
        largest = x.double().abs().amax(1, keepdim=True)
        codes = 2 * dense.abs().amax(1) * x.shape[1]
        bound = bound + largest / (2 * 32639) * dense.abs().sum(1) + largest * codes * 2**-22
    assert ((cpp.linear(x, weight) - exact).abs() <= bound).all()


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    n=st.integers(1, 50),
    k=WIDTHS,
    format=st.sampled_from([*EXACT, *CODED, *EIGHT_BIT_INPUTS]),
)
def test_a_row_of_linear_has_the_same_bits_in_any_batch(cpp, data, n, k, format):
    x, w = problem(70, n, wide_enough(k, format), seed=k)
    weight = cpp.pack(w, format)
    all_rows = cpp.linear(x, weight)
    first = data.draw(st.integers(0, 69), label="first")
    last = data.draw(st.integers(first + 1, 70), label="last")
    assert torch.equal(cpp.linear(x[first:last], weight), all_rows[first:last])


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "sparse24", "int8", "int4", "w8a8", "w4a8"])
def test_every_batch_size_gives_the_bits_of_one_row_at_a_time(cpp, format):
    """In fp32 and as a run has it; 70 tokens and 400 rows are several blocks and slabs of each kernel."""
    x, w = problem(70, 400, 1120, seed=1)
    for kernels in (cpp, CpuKernels()):
        weight = kernels.pack(w, format)
        single = torch.cat([kernels.linear(row, weight) for row in x.split(1)])
        for m in range(1, 71):
            assert torch.equal(kernels.linear(x[:m], weight), single[:m]), m


@pytest.mark.parametrize("format", [*EXACT, *CODED, *EIGHT_BIT_INPUTS])
def test_no_tokens_have_no_products(cpp, format):
    x, w = problem(0, 33, 96, seed=1)
    for kernels in (cpp, CpuKernels()):
        assert kernels.linear(x, kernels.pack(w, format)).shape == (0, 33)


def test_bits_do_not_depend_on_the_number_of_threads(cpp):
    x, w = problem(40, 600, 577, seed=2)
    both = [(kernels, kernels.pack(w, "bf16")) for kernels in (cpp, CpuKernels())]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [kernels.linear(x[:m], weight) for kernels, weight in both for m in (1, 5, 40)]
        torch.set_num_threads(3)
        shared = [kernels.linear(x[:m], weight) for kernels, weight in both for m in (1, 5, 40)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("format", [*EXACT, *CODED, *EIGHT_BIT_INPUTS])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 48, 64), (5, 33, 96), (20, 7, 160)])
def test_both_kernel_sets_compute_the_same_layer_from_the_same_codes(cpp, format, m, n, k):
    x, w = problem(m, n, k, seed=3)
    plain = TorchKernels()
    weights = cpp.pack(w, format), plain.pack(w, format)
    assert torch.equal(*map(dequantize, weights)) and weights[0].shape == weights[1].shape == (n, k)
    fast, slow = cpp.linear(x, weights[0]), plain.linear(x, weights[1])
    assert fast.shape == slow.shape == (m, n) and fast.dtype == cpp.activation_dtype
    # The plain kernels round x to bf16 for bf16 and int8; with inputs in int8 both have the same integers.
    exact = x.double() @ dequantize(weights[0]).double().T
    assert torch.allclose(slow.double(), exact, atol=0.02 * k**0.5, rtol=0.02)
    assert torch.allclose(fast, slow, atol=1e-5 * k**0.5 if format in EIGHT_BIT_INPUTS else 0.02 * k**0.5, rtol=0.02)
    assert cpp.emulates(weights[0]) is False
    assert plain.emulates(weights[1]) is (format not in ("fp32", "bf16", "int8", "w8a8"))


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 20), k=st.integers(1, 60), power=st.integers(-20, 20), seed=st.integers(0, 99))
def test_int8_is_off_by_at_most_half_a_step_of_its_row(kernels, n, k, power, seed):
    _, w = problem(1, n, k, seed)
    w = w * 2.0**power
    w[0] = 0
    weight = kernels.pack(w, "int8")
    assert weight.shape == (n, k)
    error = (dequantize(weight).double() - w.double()).abs().amax(dim=1)
    assert (error <= weight.scale[:n].double() * 0.5001).all()
    assert (dequantize(weight)[0] == 0).all()


@settings(deadline=None, max_examples=30)
@given(
    format=st.sampled_from(["int4", "int3", "int2"]),
    group=st.sampled_from([32, 64, 128, 256, None]),
    n=st.integers(1, 20),
    power=st.integers(-5, 5),
    seed=st.integers(0, 99),
)
def test_group_codes_are_off_by_at_most_half_a_step_of_their_group(kernels, format, group, n, power, seed):
    k = 384 if group is None else 3 * group
    _, w = problem(2, n, k, seed)
    w = w * 2.0**power + 2.0**power * 0.3
    weight = kernels.pack(w, format, group)
    levels = {"int4": 15, "int3": 7, "int2": 3}[format]
    groups = w.view(n, -1, group or 128)
    step = (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)) / levels
    error = (dequantize(weight).view(groups.shape) - groups).abs().amax(-1)
    # zero is rounded to a code, and fp16 rounds scale and offset.
    assert (error <= step * (1.0 + levels * 2**-9) + 2.0**-20).all()
    narrower = {"int4": 4, "int3": 3, "int2": 2}[format]
    padded = -(-n // 16) * 16 if weight.interleaved else n
    assert weight.nbytes == padded * (k * narrower // 8 + 4 * (k // (group or 128)))


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    groups=st.integers(1, 5),
    power=st.sampled_from([32, 64, 128]),
    format=st.sampled_from(["int8", "int4", "int3", "int2"]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_codes_of_another_quantizer_mean_scale_times_code_less_zero(
    kernels, m, n, groups, power, format, symmetric, seed
):
    random = torch.Generator().manual_seed(seed)
    bits = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}[format]
    lowest, highest = (-128, 127) if format == "int8" else (0, 2**bits - 1)
    codes = torch.randint(lowest, highest + 1, (n, groups * power), generator=random)
    scale = (torch.rand(n, groups, generator=random) + 0.1).half().float()
    zero = None
    if format != "int8" and not symmetric:
        zero = torch.randint(0, highest + 1, (n, groups), generator=random)
    weight = kernels.pack_codes(codes, scale, zero, format)
    middle = 0 if format == "int8" else 2 ** (bits - 1)
    centred = codes - (middle if zero is None else zero.repeat_interleave(power, dim=1))
    meant = centred * scale.repeat_interleave(power, dim=1)
    # fp16 rounds scale * zero, of up to 15 steps.
    assert (dequantize(weight) - meant).abs().max() <= 2**-11 * 16
    x = torch.randn(m, groups * power, generator=random)
    expected = x.double() @ dequantize(weight).double().T
    assert torch.allclose(kernels.linear(x, weight).double(), expected, atol=2e-3 * 2**bits, rtol=1e-3)


def test_w8a8_is_the_product_of_two_int8_matrices(kernels):
    x, w = problem(9, 35, 1037, seed=5)
    weight = kernels.pack(w, "w8a8")
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    rounded = (x * (1 / scale)).round() * scale
    expected = rounded.double() @ dequantize(weight).double().T
    assert torch.allclose(kernels.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-4)
    outlier = x.clone()
    outlier[:, 0] = 1e4  # one large activation leaves the others no bits: what SmoothQuant is for
    assert kernels.linear(outlier, weight)[:, 1:].isfinite().all()


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    group=st.sampled_from([32, 64, 96, 128, 256]),
    groups=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_w4a8_is_int4_with_inputs_rounded_to_int8_a_group_at_a_time(kernels, m, n, group, groups, seed):
    x, w = problem(m, n, group * groups, seed)
    weight = kernels.pack(w, "w4a8", group)
    assert torch.equal(dequantize(weight), dequantize(kernels.pack(w, "int4", group)))
    step = next(step for step in (128, 64, 32) if group % step == 0)
    steps = x.unflatten(1, (-1, step))
    scale = steps.abs().amax(-1, keepdim=True) / 127
    rounded = ((steps * (1 / scale)).round() * scale).flatten(1)
    expected = rounded.double() @ dequantize(weight).double().T
    assert torch.allclose(kernels.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-4)


def test_sparse24_keeps_the_two_largest_of_each_four_in_nine_sixteenths_of_the_bytes(kernels):
    _, w = problem(1, 20, 64, seed=6)
    weight = kernels.pack(w, "sparse24")
    dense = dequantize(weight).view(20, 16, 4)
    assert (dense.ne(0).sum(-1) == 2).all()
    largest = w.view(20, 16, 4).abs().topk(2, dim=-1).values.sum(-1)
    assert torch.allclose(dense.abs().sum(-1), largest, rtol=2**-7)
    assert weight.nbytes * 16 == 9 * 20 * 64 * 2
    again = kernels.pack(dequantize(weight), "sparse24")
    assert torch.equal(dequantize(again), dequantize(weight))


def test_weights_that_are_gone_are_forgotten(cpp):
    x, w = problem(1, 16, 32, seed=8)
    before = len(cpp._weights)
    for scale in range(1, 4):
        weight = cpp.pack(w * scale, "int8")
        assert torch.allclose(cpp.linear(x, weight), x @ dequantize(weight).T, atol=1e-3 * scale)
        assert len(cpp._weights) == before + 1
        del weight
    assert len(cpp._weights) == before


def test_nan_and_infinite_activations_are_not_hidden_by_rounding(cpp):
    _, w = problem(1, 20, 64, seed=7)
    for format in ("int8", "int4", "w8a8", "w4a8", "bf16"):
        x = torch.ones(3, 64)
        x[0, 5], x[1, 6] = torch.nan, torch.inf
        y = cpp.linear(x, cpp.pack(w, format))
        assert not y[:2].isfinite().any() and y[2].isfinite().all()


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    blocks=st.integers(1, 4),
    type=st.sampled_from(["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]),
    seed=st.integers(0, 99),
)
def test_gguf_blocks_mean_what_gguf_says(kernels, m, n, blocks, type, seed):
    gguf = pytest.importorskip("gguf")
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    random = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (n, blocks, nbytes), generator=random, dtype=torch.uint8)
    numbers = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[type]
    for at in numbers:  # random bytes would be infinite now and then
        raw[..., at : at + 2] = torch.rand(n, blocks, 1, generator=random).half().view(torch.uint8)
    weight = kernels.pack_gguf(raw.flatten(1), type, (n, blocks * size))
    expected = torch.from_numpy(gguf.quants.dequantize(raw.flatten(1).numpy(), gguf.GGMLQuantizationType[type]))
    assert torch.allclose(dequantize(weight), expected, rtol=1e-6)
    x = torch.randn(m, blocks * size, generator=random)
    exact = x.double() @ expected.double().T
    magnitude = x.double().abs() @ expected.double().abs().T
    assert ((kernels.linear(x, weight).double() - exact).abs() <= 1e-3 * magnitude + 1e-3).all()
    fits = {"Q6_K": 212 / 210}.get(type, 1.0) * (-(-n // 16) * 16 / n if weight.interleaved else 1.0)
    assert weight.nbytes == round(raw.numel() * fits)


def test_a_weight_that_does_not_fit_is_refused(cpp):
    with pytest.raises(ValueError, match="8 columns"):
        cpp.linear(torch.zeros(1, 8), cpp.pack(torch.zeros(4, 9), "bf16"))
    with pytest.raises(TypeError, match="fp32 activations"):
        cpp.linear(torch.zeros(1, 9, dtype=torch.bfloat16), cpp.pack(torch.zeros(4, 9), "bf16"))
    with pytest.raises(ValueError, match="no such weight format: int5; there are fp32"):
        cpp.pack(torch.zeros(4, 9), "int5")
    with pytest.raises(ValueError, match="packed by other kernels"):
        cpp.linear(torch.zeros(1, 32), TorchKernels().pack(torch.zeros(4, 32), "int4"))
    with pytest.raises(ValueError, match="group_size: is open, but int4 needs rows"):
        cpp.pack(torch.zeros(4, 40), "int4")
    with pytest.raises(ValueError, match="group_size: is 48, but int4 needs rows"):
        cpp.pack(torch.zeros(4, 96), "int4", 48)
    with pytest.raises(ValueError, match="group_size: is 32, but int8 has no groups"):
        cpp.pack(torch.zeros(4, 96), "int8", 32)
    with pytest.raises(ValueError, match="rows of 40, sparse24 needs a multiple of 16"):
        cpp.pack(torch.zeros(4, 40), "sparse24")
    with pytest.raises(ValueError, match="q4_k weights come from a GGUF file"):
        cpp.pack(torch.zeros(4, 256), "q4_k")
    with pytest.raises(ValueError, match="codes: are 0 to 16, int4 has 0 to 15"):
        cpp.pack_codes(torch.tensor([[0, 16] * 16]), torch.ones(1, 1), None, "int4")
    with pytest.raises(ValueError, match="scale: has 3 groups for rows of 64"):
        cpp.pack_codes(torch.zeros(1, 64), torch.ones(1, 3), None, "int4")
    with pytest.raises(ValueError, match="zero: int8 codes are symmetric"):
        cpp.pack_codes(torch.zeros(1, 64), torch.ones(1), torch.ones(1), "int8")
    with pytest.raises(ValueError, match="type: is Q3_K"):
        cpp.pack_gguf(torch.zeros(1, 110, dtype=torch.uint8), "Q3_K", (1, 256))
    with pytest.raises(ValueError, match="raw: has 110 bytes for 1 x 256 numbers, Q4_K has 144 bytes for each 256"):
        cpp.pack_gguf(torch.zeros(1, 110, dtype=torch.uint8), "Q4_K", (1, 256))
    for format in ("int8", "int4", "fp8", "sparse24"):
        with pytest.raises(ValueError, match="should be finite"):
            cpp.pack(torch.full((4, 32), torch.nan), format)


@settings(deadline=None, max_examples=60)
@given(m=st.integers(1, 70), n=st.integers(1, 50), k=WIDTHS, format=st.sampled_from(BF16_FORMATS))
def test_units_for_bf16_multiply_tokens_that_are_rounded_to_it(bf16_cpp, m, n, k, format):
    """What is multiplied has 8 bits, so each product is exact; of the sums each rounds once."""
    x, w = problem(m, n, wide_enough(k, format), seed=n)
    weight = bf16_cpp.pack(w, format)
    dense, rounded = dequantize(weight).double(), x.to(torch.bfloat16).double()
    y = bf16_cpp.linear(x, weight)
    assert ((y - rounded @ dense.T).abs() <= 2 * (k + 2) * 2**-24 * (rounded.abs() @ dense.abs().T) + 1e-30).all()
    single = torch.cat([bf16_cpp.linear(row, weight) for row in x.split(1)])
    assert torch.equal(y, single)


def test_units_for_bf16_take_every_number_of_fp8(bf16_cpp, cpp):
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0)
    w = numbers.repeat(3, 1)
    y, plain = (kernels.linear(torch.eye(256), kernels.pack(w, "fp8")) for kernels in (bf16_cpp, cpp))
    assert torch.equal(y, w.T) and torch.equal(plain, w.T)
