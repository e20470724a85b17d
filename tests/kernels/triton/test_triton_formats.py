"""Every weight and cache format through the Triton kernels' common face agrees with plain PyTorch."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.base import RaggedBatch  # noqa: E402
from membound.kernels.gpu import TritonKernels  # noqa: E402
from membound.kernels.kv_formats import QuantizedKv  # noqa: E402
from membound.kernels.reference import TorchKernels  # noqa: E402
from membound.kernels.triton.launch import recording  # noqa: E402
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402
from membound.roofline.techniques import W8A8, WeightQuantization, engine_setup  # noqa: E402
from membound.runtime.linear import KernelLinear  # noqa: E402
from membound.runtime.quantization.quantized import QuantizationError  # noqa: E402
from membound.runtime.quantization.recipes import RoundingRecipe  # noqa: E402


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4", "int3", "int2", "w8a8", "w4a8", "fp8", "sparse24"])
def test_a_weight_packed_for_triton_multiplies_as_the_plain_kernels_do(device, format):
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 128, generator=random), torch.randn(40, 128, generator=random).bfloat16().float()
    kernels, plain = TritonKernels(str(device)), TorchKernels()
    weight = kernels.pack(w.to(device), format)
    assert weight.shape == (40, 128)
    y = kernels.linear(x.to(device, torch.bfloat16), weight)
    expected = plain.linear(x.bfloat16().float(), plain.pack(w, format))
    assert y.dtype is torch.bfloat16
    assert torch.allclose(y.float().cpu(), expected, atol=0.3, rtol=0.02)


@given(seed=st.integers(0, 2**31), n=st.sampled_from([1, 65]), low=st.integers(60, 120))
@settings(deadline=None, max_examples=30)
def test_the_numbers_of_an_mxfp4_checkpoint_are_rounded_to_themselves(seed, n, low):
    random = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 16, (n, 96), dtype=torch.uint8, generator=random)
    scale = torch.randint(low, low + 30, (n, 3), dtype=torch.uint8, generator=random)
    numbers = Mxfp4Weight.pack(code, scale).dequantized()
    assert torch.equal(Mxfp4Weight.quantize(numbers.bfloat16()).dequantized(), numbers)


def test_mxfp4_is_kept_and_multiplied_by_its_kernel_on_a_gpu_and_refused_elsewhere(device):
    plan = engine_setup((WeightQuantization(format="mxfp4"),)).precision
    w, x = torch.randn(70, 96), torch.randn(3, 96).bfloat16()
    recipe = RoundingRecipe(TritonKernels(str(device)), plan)
    recipe.layers = 1
    linear = recipe.linear("layers.0.experts.3.down", w.to(device))
    expected = x.float() @ Mxfp4Weight.quantize(w).dequantized().T
    assert not linear.emulated
    assert torch.allclose(linear(x.to(device)).float().cpu(), expected, atol=0.05, rtol=0.02)
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        linear(x.to(device))
    assert record.launches[0].name == "linear_mxfp4_kernel"
    with pytest.raises(QuantizationError, match="has rows of 40, and mxfp4 has a scale for each 32"):
        recipe.linear("layers.0.experts.3.down", torch.randn(8, 40))
    with pytest.raises(QuantizationError, match="weights in mxfp4 is predicted, not measured yet"):
        RoundingRecipe(TorchKernels(), plan)
    with pytest.raises(ValueError, match="mxfp4 weights are multiplied by the Triton kernels on a GPU alone"):
        TorchKernels().pack(w, "mxfp4")


@pytest.mark.parametrize("group", [64, 128, 256])
def test_4_bits_times_8_is_one_launch_that_rounds_and_one_product_in_integers(device, group):
    random = torch.Generator().manual_seed(4)
    w, x = torch.randn(70, 512, generator=random), torch.randn(3, 512, generator=random).bfloat16()
    kernels, plain = TritonKernels(str(device)), TorchKernels()
    weight = kernels.pack(w.to(device), "w4a8", group)
    assert not kernels.emulates(weight) and kernels.emulates(kernels.pack(w.to(device), "w4a8", 32))
    expected = plain.linear(x.float(), plain.pack(w, "w4a8", group))
    assert torch.allclose(kernels.linear(x.to(device), weight).float().cpu(), expected, atol=0.3, rtol=0.02)
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        kernels.linear(x.to(device), weight)
    assert [launch.name for launch in record.launches][:2] == ["round_rows_kernel", "linear_w4a8_kernel"]


@pytest.mark.parametrize("zero", [None, 3.0, 7.25])
def test_codes_of_another_quantizer_reach_triton(device, zero):
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (40, 128), generator=random)
    scale = torch.rand(40, 2, generator=random) + 0.1
    zeros = None if zero is None else torch.full((40, 2), zero)
    x = torch.randn(2, 128, generator=random)
    kernels, plain = TritonKernels(str(device)), TorchKernels()
    on_device = [None if t is None else t.to(device) for t in (codes, scale, zeros)]
    y = kernels.linear(x.to(device, torch.bfloat16), kernels.pack_codes(*on_device, "int4"))
    expected = plain.linear(x.bfloat16().float(), plain.pack_codes(codes, scale, zeros, "int4"))
    assert torch.allclose(y.float().cpu(), expected, atol=0.5, rtol=0.02)


@pytest.mark.parametrize(
    ("technique", "launched"),
    [
        (WeightQuantization(format="fp8"), ["linear_byte_kernel"]),
        (WeightQuantization(format="fp8_block"), ["linear_fp8_blocks_kernel"]),
        (W8A8(format="fp8"), ["peak_kernel", "round_by_peak_kernel", "linear_w8a8_kernel"]),
        (W8A8(format="fp8_row"), ["round_rows_kernel", "linear_w8a8_kernel"]),
        (W8A8(format="fp8_block"), ["round_rows_kernel", "linear_fp8_blocks_kernel"]),
    ],
    ids=lambda value: f"{value.name} {value.format}" if hasattr(value, "format") else "",
)
def test_fp8_of_every_granularity_is_multiplied_as_it_is_stored(device, technique, launched):
    """What plain PyTorch emulates."""
    random = torch.Generator().manual_seed(3)
    w = torch.randn(200, 300, generator=random) * torch.logspace(-1, 1, 300)
    x = torch.randn(5, 300, generator=random).bfloat16()
    plan = engine_setup((technique,)).precision
    kernels = TritonKernels(str(device))
    recipes = RoundingRecipe(kernels, plan), RoundingRecipe(TorchKernels(), plan)
    for recipe in recipes:
        recipe.layers = 1
    linear, plain = (r.linear("layers.0.qkv", w.to(where)) for r, where in zip(recipes, (device, "cpu"), strict=True))
    assert not linear.emulated and plain.emulated
    y, expected = linear(x.to(device)).float().cpu(), plain(x.float())
    assert (y - expected).abs().max() < 0.02 * expected.abs().max()
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        linear(x.to(device))
    assert [launch.name for launch in record.launches] == launched
    assert linear.nbytes == plan.weights.matrix_bytes(200, 300) + (4 * 199 if technique.format == "fp8" else 0)


@pytest.mark.parametrize(
    ("format", "codes", "scale", "problem"),
    [
        ("int4", 16, 1.0, "codes: are 16 to 16, int4 has 0 to 15"),
        ("w4a8", -1, 1.0, "codes: are -1 to -1, w4a8 has 0 to 15"),
        ("int8", 200, 1.0, "codes: are 200 to 200, int8 has -128 to 127"),
        ("int4", 1, 1e6, "scale: is infinite or NaN in fp16"),
        ("int8", 1, float("nan"), "scale: is infinite or NaN in fp16"),
    ],
)
def test_codes_and_scales_that_a_format_has_not_are_told_before_they_are_packed(device, format, codes, scale, problem):
    """Packed, 16 would be 0 with a 1 in its neighbour."""
    given = torch.full((8, 128), codes, device=device), torch.full((8, 2), scale, device=device)
    with pytest.raises(ValueError, match=problem):
        TritonKernels(str(device)).pack_codes(*given, None, format)


NUMBERS = torch.Generator().manual_seed(5)
BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def gguf_blocks(type):
    """32 rows of 128 numbers whose scales, and for Q4_1 minima, are near 1."""
    raw = torch.randint(0, 256, (32, 4, BYTES[type]), generator=NUMBERS, dtype=torch.uint8)
    raw[..., 1] = 0x3C  # fp16 from 1 to 1.25
    raw[..., 3] = 0x3C if type == "Q4_1" else raw[..., 3]
    return raw.flatten(1)


def plain_numbers():
    return torch.randn(32, 128, generator=NUMBERS).bfloat16().float()


def codes_in_groups(bits, group, zero=None):
    signed = bits == 8
    codes = torch.randint(0, 2**bits, (32, 2 * group), generator=NUMBERS) - 128 * signed
    scale = torch.rand(32, 2, generator=NUMBERS) + 0.1
    return codes, scale, None if zero is None else torch.full((32, 2), zero)


@pytest.mark.parametrize(
    ("made", "emulated"),
    [
        (lambda kernels, on: kernels.pack_gguf(on(gguf_blocks("Q4_0")), "Q4_0", (32, 128)), False),
        (lambda kernels, on: kernels.pack_gguf(on(gguf_blocks("Q4_1")), "Q4_1", (32, 128)), True),
        (lambda kernels, on: kernels.pack_gguf(on(gguf_blocks("Q8_0")), "Q8_0", (32, 128)), False),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(8, 64)), "int8"), False),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(8, 96)), "int8"), True),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(4, 64)), "int4"), False),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(4, 64, 7.0)), "int4"), False),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(4, 64, 7.25)), "int4"), True),
        (lambda kernels, on: kernels.pack_codes(*map(on, codes_in_groups(4, 96)), "int4"), True),
        (lambda kernels, on: kernels.pack(on(plain_numbers()), "int8"), False),
        (lambda kernels, on: kernels.pack(on(plain_numbers()), "fp8"), False),
        (lambda kernels, on: kernels.pack(on(plain_numbers()), "int3"), True),
        (lambda kernels, on: kernels.pack(on(plain_numbers()), "sparse24"), False),
    ],
)
def test_what_no_triton_kernel_multiplies_is_emulated_whatever_its_format(device, made, emulated):
    kernels, plain = TritonKernels(str(device)), TorchKernels()
    state = NUMBERS.get_state()
    weight = made(kernels, lambda tensor: None if tensor is None else tensor.to(device))
    NUMBERS.set_state(state)
    same = made(plain, lambda tensor: tensor)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(6)).bfloat16()
    assert KernelLinear(kernels, weight).emulated is kernels.emulates(weight) is emulated
    expected = plain.linear(x.float(), same)
    y = kernels.linear(x.to(device), weight).float().cpu()
    assert (y - expected).abs().max() < 0.02 * expected.abs().max()
    with recording(REFERENCE_MACHINES["sm90"]) as record:
        kernels.linear(x.to(device), weight)
    assert bool(record.launches) is not emulated


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_quantized_blocks_are_stored_and_read_as_the_plain_kernels_do(device, format):
    random = torch.Generator().manual_seed(2)
    kernels, plain = TritonKernels(str(device)), TorchKernels()
    batch = RaggedBatch(
        torch.arange(6),
        torch.arange(6) + 3,
        torch.tensor([0, 6], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        6,
    )
    batch = replace(batch, slots=torch.arange(6))
    qkv = torch.randn(6, (4 + 2 * 2) * 32, generator=random).bfloat16().float()
    angle = torch.rand(6, 16, generator=random)
    results = []
    for set_, where, dtype in ((kernels, device, torch.bfloat16), (plain, torch.device("cpu"), torch.float32)):
        kv = QuantizedKv.zeros(format, 1, 16, 2, 32, where)
        on = batch.to(where)
        q = set_.rope_and_store_quantized(qkv.to(where, dtype), angle.cos().to(where), angle.sin().to(where), on, kv)
        y = set_.attention_quantized(q, kv, on, 0.2)
        tree = replace(on, tree=torch.tensor([1, 3, 5, 9, 17, 35], device=where))
        drafted = set_.attention_quantized(q, kv, tree, 0.2)
        windowed = set_.attention_quantized(q, kv, on, 0.2, window=2)
        scores = set_.attention_scores(q, kv, on, 0.2, queries=2)
        results.append([t.float().cpu() for t in (y, drafted, windowed, scores)])
    for ours, theirs in zip(*results, strict=True):
        # The two round halves of a step differently, which moves single codes of int4 by one.
        assert (ours - theirs).square().mean().sqrt() < 0.03 and (ours - theirs).abs().max() < 0.3
