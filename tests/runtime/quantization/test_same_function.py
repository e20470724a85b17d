"""What is only moved changes no output: folded scales, rotations; and recipes hand out what they promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from membound.kernels.reference import TorchKernels
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.precision.plan import PrecisionPlan, plan_of
from membound.roofline.techniques import W8A8, Sparsity24, WeightQuantization, engine_setup
from membound.runtime.decoder import Decoder
from membound.runtime.linear import KernelLinear
from membound.runtime.loading.weights import Weights, load_safetensors, random_weights
from membound.runtime.plain import single_sequence
from membound.runtime.quantization import calibration
from membound.runtime.quantization.calibration import Calibrator, ObservingRecipe, collect_statistics
from membound.runtime.quantization.folding import Folder
from membound.runtime.quantization.hadamard import rotation
from membound.runtime.quantization.quantized import QuantizationError
from membound.runtime.quantization.quarot import rotated, rotated_moments
from membound.runtime.quantization.recipes import QUANTIZERS, QuarotRecipe, format_problem, recipe_for

TINY = ("tiny_qwen2", "tiny_qwen3", "tiny_llama3")


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32

    def pack(self, weight, format, group_size=None):
        return super().pack(weight, "fp32" if format == "bf16" else format, group_size)


def exact(weights: Weights) -> Weights:
    """Matrices in fp32, so that what is folded into them is not rounded."""
    layers = tuple({name: tensor.float() for name, tensor in layer.items()} for layer in weights.layers)
    return replace(weights, layers=layers, embed=weights.embed.float(), lm_head=weights.lm_head.float())


def logits(decoder: Decoder, ids: list[int]) -> Tensor:
    batch = single_sequence(0, len(ids), -(-len(ids) // 16), decoder.device)
    return decoder.forward(torch.tensor(ids), batch, decoder.new_cache(-(-len(ids) // 16), 16), torch.arange(len(ids)))


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest, reference: Path) -> tuple[ModelSpec, Weights, list[int]]:
    expected = json.loads((reference / request.param / "expected.json").read_text(encoding="utf-8"))
    spec, weights = load_safetensors(reference / request.param)
    return spec, exact(weights), expected["ids"]


def test_folded_scales_change_no_logits(tiny: tuple[ModelSpec, Weights, list[int]]) -> None:
    spec, weights, ids = tiny
    generator = torch.Generator().manual_seed(0)
    layers = []
    for layer, tensors in zip(spec.stack, weights.layers, strict=True):
        folder = Folder(layer, dict(tensors))
        for part in ("qkv", "o", "gate_up", "down"):
            assert folder.takes(part)
            scales = torch.rand(tensors[part].shape[1], generator=generator) + 0.5
            folder.fold(part, folder.shared(part, scales))
        layers.append(folder.tensors)
    folded = Decoder(spec, replace(weights, layers=tuple(layers)), ExactKernels())
    torch.testing.assert_close(
        logits(folded, ids), logits(Decoder(spec, weights, ExactKernels()), ids), rtol=0, atol=2e-4
    )


def test_a_rotated_model_computes_the_same(tiny: tuple[ModelSpec, Weights, list[int]]) -> None:
    spec, weights, ids = tiny
    decoder = Decoder(spec, weights, ExactKernels(), QuarotRecipe(ExactKernels(), PrecisionPlan()))
    plain = Decoder(spec, weights, ExactKernels())
    torch.testing.assert_close(logits(decoder, ids), logits(plain, ids), rtol=0, atol=2e-4)
    turned = rotated(spec, weights)
    assert not torch.allclose(turned.layers[0]["qkv"], weights.layers[0]["qkv"], atol=1e-2)
    assert (turned.final_norm == 1).all()


def test_moments_are_rotated_as_the_inputs_are(tiny: tuple[ModelSpec, Weights, list[int]]) -> None:
    spec, weights, ids = tiny
    kernels = ExactKernels()
    before = {name: one.moments for name, one in collect_statistics(spec, weights, kernels, [ids]).items()}
    observing = ObservingRecipe(QuarotRecipe(kernels, PrecisionPlan()))
    logits(Decoder(spec, weights, kernels, observing), ids)
    for name, moments in rotated_moments(spec, weights, before).items():
        seen = observing.accumulators[name].statistics().moments
        if name.endswith(".down"):  # rotated behind the place where it is observed
            turn = rotation(len(seen))
            seen = turn.apply(turn.apply(seen).T.contiguous())
        torch.testing.assert_close(moments, seen, rtol=1e-3, atol=1e-4 * float(seen.abs().max()))


def test_statistics_are_those_of_the_inputs_of_each_matrix(tiny: tuple[ModelSpec, Weights, list[int]]) -> None:
    spec, weights, ids = tiny
    seen = collect_statistics(spec, weights, ExactKernels(), [ids, ids[:10]])
    assert set(seen) == {f"layers.{i}.{p}" for i in range(spec.layers) for p in ("qkv", "o", "gate_up", "down")}
    assert {one.tokens for one in seen.values()} == {len(ids) + 10}
    first = weights.embed[torch.tensor(ids + ids[:10])]
    normed = ExactKernels().rms_norm(first, weights.layers[0]["mixer_norm"], spec.norm_eps)
    torch.testing.assert_close(seen["layers.0.qkv"].moments, normed.T @ normed / len(normed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("techniques", "emulated"),
    [
        ((WeightQuantization(format="int4_g32"),), True),
        ((WeightQuantization(format="int8_g32", method="gptq"),), None),
        ((WeightQuantization(format="int3_g32_zero", method="awq"),), True),
        ((WeightQuantization(format="fp8_block"),), True),
        ((WeightQuantization(format="int4_row", activations="int4_row", method="quarot"),), True),
        ((W8A8(format="int8", method="smoothquant"),), None),
        ((W8A8(format="int8", method="llm_int8"),), None),
        ((W8A8(format="fp8_row"),), True),
        ((Sparsity24(method="wanda"),), True),
        ((Sparsity24(method="sparsegpt"), WeightQuantization(format="int8_g32", method="gptq")), True),
    ],
    ids=lambda value: "+".join(t.name + t.method for t in value) if isinstance(value, tuple) else "",
)
def test_every_method_builds_a_decoder_that_is_near_the_model(techniques, emulated, reference: Path) -> None:
    spec, weights = load_safetensors(reference / "tiny_llama3")
    ids = json.loads((reference / "tiny_llama3" / "expected.json").read_text(encoding="utf-8"))["ids"]
    kernels = TorchKernels()
    plan = engine_setup(techniques).precision
    assert format_problem(plan) is None
    recipe = recipe_for(techniques, plan, kernels, Calibrator(kernels, [ids]))
    decoder, plain = Decoder(spec, weights, kernels, recipe), Decoder(spec, weights, kernels)
    got, want = logits(decoder, ids), logits(plain, ids)
    assert torch.isfinite(got).all() and not torch.equal(got, want)
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    # a random model has no small weights: without half of them it is hardly itself
    assert cosine > (0.3 if plan.weights.sparse else 0.95 if plan.weights.width == 8 else 0.6)
    if emulated is not None:
        assert decoder.emulated == emulated
    lm_head = dict(decoder.linears())["lm_head"]
    assert lm_head.nbytes == 2 * spec.vocab * spec.hidden  # tables keep 16 bits, as in checkpoints


def test_int4_weights_with_int8_inputs_have_one_kernel_and_the_lm_head_its_own_format(reference: Path) -> None:
    spec, weights = load_safetensors(reference / "tiny_llama3")
    ids = json.loads((reference / "tiny_llama3" / "expected.json").read_text(encoding="utf-8"))["ids"]
    technique = WeightQuantization(format="int4_g32", activations="int8", lm_head="int8")
    kernels = TorchKernels()
    recipe = recipe_for((technique,), engine_setup((technique,)).precision, kernels, None)
    decoder = Decoder(spec, weights, kernels, recipe)
    linears = dict(decoder.linears())
    formats = {name: linear.weight.format for name, linear in linears.items() if isinstance(linear, KernelLinear)}
    assert len(formats) == len(linears) and formats.pop("lm_head") == "w8a8" and set(formats.values()) == {"w4a8"}
    narrow = Decoder(
        spec, weights, kernels, recipe_for((WeightQuantization(format="int4_g32"),), plan_of("int4_g32"), kernels, None)
    )
    got, want = logits(decoder, ids), logits(narrow, ids)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99  # 8 bits of x cost little


def test_pruned_and_quantized_weights_are_still_pruned(reference: Path) -> None:
    spec, weights = load_safetensors(reference / "tiny_llama3")
    techniques = (Sparsity24(method="sparsegpt"), WeightQuantization(format="int4_g32", method="gptq"))
    kernels = TorchKernels()
    calibrator = Calibrator(kernels, [list(range(3, 60))])
    recipe = recipe_for(techniques, engine_setup(techniques).precision, kernels, calibrator)
    name, part = "layers.1.down", recipe.prepare(spec, weights).layers[1]["down"]
    values = recipe.linear(name, part)(torch.eye(part.shape[1])).T
    assert ((values.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all() and (values != 0).any()


def test_only_the_layers_that_the_plan_names_are_quantized() -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"layers": 3, "vocab": 64})
    weights = random_weights(spec, seed=0, layers=3)
    plan = plan_of("int4_g64", plain_first_layers=1, plain_last_layers=1)
    recipe = QUANTIZERS["rtn"](TorchKernels(), plan)
    recipe.prepare(spec, weights)
    widths = [recipe.format_of(f"layers.{i}.down").width for i in range(3)]
    assert widths == [16, 4, 16]


def test_moments_that_do_not_fit_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"vocab": 64})
    weights = random_weights(spec, seed=0, layers=1)
    monkeypatch.setattr(calibration, "MOMENTS_SHARE", 1e-9)
    with pytest.raises(QuantizationError, match=r"give a method without them: rtn, smoothquant"):
        collect_statistics(spec, weights, TorchKernels(), [[1, 2, 3]])
    assert collect_statistics(spec, weights, TorchKernels(), [[1, 2, 3]], moments=False)["layers.0.o"].tokens == 3


def test_without_text_nothing_is_calibrated() -> None:
    for technique in (WeightQuantization(format="int4", method="gptq"), Sparsity24(method="wanda")):
        with pytest.raises(QuantizationError, match=f"method '{technique.method}' needs calibration text"):
            recipe_for((technique,), engine_setup((technique,)).precision, TorchKernels(), None)


def test_parts_of_matrices_are_not_calibrated() -> None:
    kernels = TorchKernels()
    technique = WeightQuantization(format="int4", method="gptq")
    with pytest.raises(QuantizationError, match="needs whole matrices"):
        recipe_for(
            (technique,), engine_setup((technique,)).precision, kernels, Calibrator(kernels, [[1]]), divided=True
        )


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "nf4", "exl2_4.25"])
def test_what_cannot_be_quantized_to_is_one_sentence(format: str) -> None:
    problem = format_problem(plan_of(format))
    assert problem is not None and "\n" not in problem
    assert "is predicted, not measured yet: the runtime has " in problem
