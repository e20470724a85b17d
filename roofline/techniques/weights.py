"""Which techniques make the weights smaller?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from membound.roofline.errors import MemboundError
from membound.roofline.parallel import Parallelism
from membound.roofline.precision import GGML_BLOCKS, GGML_MIXES, PRECISIONS, Precision, get_precision, sparse24
from membound.roofline.precision.names import parse_precision
from membound.roofline.precision.plan import PrecisionPlan, compute_dtype, usual_exceptions
from membound.roofline.techniques.base import Attacked, Technique
from membound.roofline.techniques.quality import Quality, of_width, perplexity, points
from membound.roofline.techniques.setup import EngineSetup

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec
    from membound.roofline.models import ModelSpec

# What these weights are multiplied with: scales of activations run along the row, those of the weights may be blocks.
_ACTIVATIONS = {"fp8": "fp8", "fp8_row": "fp8_row", "fp8_block": "fp8_g128", "int8": "int8", "mxfp8": "mxfp8"}

# Formats that engines never multiply with 16 bits where the device multiplies them: vLLM's `--quantization fp8` is
# W8A8, and weight-only (Marlin) where the GPU has no fp8 unit (docs.vllm.ai, "FP8 W8A8").
_ROUNDED_WITH = {"nvfp4": "nvfp4"} | {name: _ACTIVATIONS[name] for name in ("fp8", "fp8_row", "fp8_block")}

# Engines that do, by the library of their profile.
_ROUNDING = ("vllm", "sglang", "trtllm")

# How the codes of a format are chosen, and what is done to the model for it (runtime/quantization).
QuantizationMethod = Literal["rtn", "gptq", "awq", "smoothquant", "llm_int8", "quarot", "found"]
PruningMethod = Literal["magnitude", "wanda", "sparsegpt"]
_METHOD_HELP = (
    "how the codes are chosen: rtn rounds to nearest; gptq, awq, smoothquant and llm_int8 read calibration text; "
    "quarot rotates the model; found keeps the blocks of a GGUF. The predicted cost does not depend on it: what "
    "llm_int8 and quarot do to activations in each step is left out"
)

_INT8_QUALITY = Quality(
    1,
    "KL 0.005 nats to bf16, 96.8 % equal top-1 tokens (SmolLM2-135M)",
    "measured: README, live-cpu",
    "3.2 % of top-1 tokens",
    0.032,
)
_QUALITY_BY_BITS = {
    8: points(
        1,
        68.69,
        68.54,
        "Open LLM Leaderboard average 68.69 to 68.54 (Meta-Llama-3-8B-Instruct, int8)",
        "neuralmagic/Meta-Llama-3-8B-Instruct-quantized.w8a16 README.md",
    ),
    4: perplexity(2, 1.0, 1.009, "+0.9 % (LLaMA-1-7B, Q4_K_M against F16)", "llama.cpp PR 1684; claims A1-44"),
    3: perplexity(
        3, 13.1, 21.7, "13.1 to 21.7 (SmolLM2-135M, 3 bits with GPTQ)", "measured: data/measurements/README.md, Quality"
    ),
    2: perplexity(
        4, 6.1, 210, "6.1 becomes 210 to 1.7e6 at 2 bits (LLaMA3-8B)", "arXiv 2404.14047, table 1; claims A1-48"
    ),
}
_FOUR_BIT_PRODUCTS_QUALITY = perplexity(
    2, 17.92, 18.28, "17.92 to 18.28 (Qwen3-8B, NVFP4 weights and activations)", "Rodder5/Qwen3-8B-NVFP4 README.md"
)
_W8A8_FP8_QUALITY = points(
    1,
    73.48,
    73.19,
    "Open LLM Leaderboard average 73.48 to 73.19 (Mixtral-8x7B-Instruct-v0.1, fp8)",
    "neuralmagic/Mixtral-8x7B-Instruct-v0.1-FP8 README.md; lossless at all sizes of Llama-3.1: arXiv 2411.02355",
)
_W8A8_INT8_QUALITY = Quality(
    1, "1 to 3 % of accuracy (Llama-3.1, int8, tuned)", "arXiv 2411.02355, abstract", "points -1 to -3 %", 0.03
)
_SPARSE_QUALITY = perplexity(
    3,
    5.12,
    10.2,
    "5.12 to 10.2 (Llama-2-7B), 3.12 to 5.40 (70B), SparseGPT without fine-tuning",
    "Wanda's table; claims A2-16 and A2-18",
)


class WeightFormat(Technique):
    """A technique that sets the formats of the weights, instead of those in which the model is published."""

    layer = "weights"
    baseline = "bf16 weights"
    lossless = False
    sets_weights = True
    attacks: ClassVar[tuple[Attacked, ...]] = ("memory_weights",)

    @classmethod
    def compared_with(cls, before: EngineSetup) -> str:
        published = before.precision
        if published.weights.width >= 16:
            return cls.baseline
        multiplied = f", {published.activations.name} activations" if "activations" in cls.baseline else ""
        return f"{published.weights.name} weights{multiplied}"


class Int8Weights(WeightFormat):
    """Weight-only int8, round to nearest, one fp32 scale a row, in the lm_head too: half the bytes of bf16."""

    family = "move fewer bytes"
    title = "8-bit weights"
    gain_metric = "tpot_s"

    name: Literal["int8_weights"] = "int8_weights"

    def apply(self, setup: EngineSetup) -> EngineSetup:
        plain = setup.precision.plain
        return _quantized(setup, PRECISIONS["int8"], PRECISIONS["bf16"], {"embedding": plain})

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return cls() if hardware.kind == "cpu" else None  # elsewhere `w8a8` computes faster too

    @property
    def quality(self) -> Quality:
        return _INT8_QUALITY


class WeightQuantization(WeightFormat):
    """Weights in any format that membound knows, and activations with them where they are given.

    Without `activations` the weights are unpacked to 16 bits before they are multiplied: fewer bytes, no higher rate.
    vLLM, SGLang and TensorRT-LLM round them with fp8 and NVFP4 weights all the same where the device multiplies those.
    The parts that checkpoints in a format usually keep in 16 bits (tables, routers) stay there; of a small model the
    `lm_head` is much of its bytes. The format `bf16` undoes the quantization of a model that is published quantized.
    """

    family = "move fewer bytes"
    title = "weight quantization"
    gain_metric = "tpot_s"
    meant_by = (
        dict.fromkeys(("gptq", "marlin"), "format: int4_g128, method: gptq")
        | dict.fromkeys(("awq", "w4a16", "int4", "int4weights", "4bit"), "format: int4_g128, method: awq")
        | {format: f"format: {format}" for format in ("mxfp4", "nvfp4")}
    )

    name: Literal["weight_quantization"] = "weight_quantization"
    format: str = Field("int4", description="int4, awq, q4_k_m, fp8_block, nvfp4, mxfp4, ternary and others")
    activations: str | None = Field(
        None, description="the format of what is multiplied with them; without, what the engine takes, else 16 bits"
    )
    lm_head: str | None = Field(
        None, description="the format of the lm_head, such as int8; without, what checkpoints in `format` usually have"
    )
    plain_layers: int | None = Field(
        None, ge=1, description="so many of the first layers, and of the last, stay in 16 bits; none without"
    )
    method: QuantizationMethod = Field("rtn", description=_METHOD_HELP)

    @model_validator(mode="before")
    @classmethod
    def _format_may_name_its_method(cls, data: Any) -> Any:
        """`format: gptq` and `format: awq` mean the method too."""
        if isinstance(data, dict) and data.get("format") in ("gptq", "awq") and "method" not in data:
            return {**data, "method": data["format"]}
        return data

    @field_validator("format")
    @classmethod
    def _is_narrow_or_bf16(cls, name: str) -> str:
        format = _weight_format(name)
        if format.width >= 16 and format.name != "bf16":
            raise ValueError(
                "no quantization has 16 bits or more but bf16, which undoes one; give one such as int4, fp8 or q4_k_m"
            )
        return name

    @field_validator("lm_head")
    @classmethod
    def _is_a_weight_format(cls, name: str | None) -> str | None:
        if name is not None:
            _weight_format(name)
        return name

    @field_validator("activations")
    @classmethod
    def _is_multiplied(cls, name: str | None) -> str | None:
        format = None if name is None else parse_precision(name, "activations")
        if format is not None and (format.name in GGML_BLOCKS | GGML_MIXES or format.sparse or format.width < 4):
            raise ValueError("activations are rounded in each step; give one such as fp8, fp8_g128, int8 or nvfp4")
        return name

    @model_validator(mode="after")
    def _bf16_is_multiplied_as_it_is(self) -> WeightQuantization:
        activations = parse_precision(self.activations or "", "activations")
        if activations is not None and activations.width < 16 <= _weight_format(self.format).width:
            raise ValueError(f"bf16 weights are multiplied with 16 bits, not with {activations.name}; leave that out")
        return self

    @model_validator(mode="after")
    def _method_fits_the_format(self) -> WeightQuantization:
        _check_method(self.method, _weight_format(self.format), parse_precision(self.activations or "", "activations"))
        return self

    def apply(self, setup: EngineSetup) -> EngineSetup:
        weights = _weight_format(self.format)
        activations = parse_precision(self.activations or "", "activations") or PRECISIONS["bf16"]
        head = {} if self.lm_head is None else {"lm_head": _weight_format(self.lm_head)}
        quantized = _quantized(setup, weights, activations, usual_exceptions(weights, setup.precision.plain) | head)
        ends = self.plain_layers or 0
        plan = replace(quantized.precision, plain_first_layers=ends, plain_last_layers=ends)
        return replace(quantized, precision=plan)

    @classmethod
    def suited(cls, hardware: HardwareSpec) -> Self:
        """Four bits as the device takes them: multiplied as they are where it can, as NVIDIA's and AMD's Quark do."""
        if hardware.computes_in("fp4"):
            multiplied = "nvfp4" if hardware.vendor == "NVIDIA" else "mxfp4"
            return cls(format=multiplied, activations=multiplied)
        return cls() if hardware.kind == "cpu" else cls(format="awq")  # what GPUs' engines read and hubs hold

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return cls.suited(hardware)

    @property
    def quality(self) -> Quality:
        weights = _weight_format(self.format)
        activations = parse_precision(self.activations or "", "activations") or engines_activations(weights)
        if activations is not None and activations.width <= 4:
            return _FOUR_BIT_PRODUCTS_QUALITY
        return of_width(weights.width, _QUALITY_BY_BITS)


def engines_activations(weights: Precision) -> Precision | None:
    """What engines round activations to for these weights, where the device multiplies both; None for 16 bits."""
    name = _ROUNDED_WITH.get(weights.name)
    return None if name is None else PRECISIONS[name]


def leaves_rounding_to(library: str, techniques: Iterable[Technique]) -> bool:
    """Whether techniques say nothing of activations, and engines whose kernels are that `library` round some."""
    unsaid = any(isinstance(one, WeightQuantization) and one.activations is None for one in techniques)
    return unsaid and library in _ROUNDING


def rounded_by_engine(setup: EngineSetup, hardware: HardwareSpec) -> EngineSetup:
    """The set-up with what engines round activations to for its weights, where the device multiplies both."""
    rounded = engines_activations(setup.precision.weights)
    if rounded is None or compute_dtype(setup.precision.weights, rounded, hardware).emulated:
        return setup
    return replace(setup, precision=replace(setup.precision, activations=rounded))


def weights_in(format: str) -> Int8Weights | WeightQuantization:
    """The technique that keeps weights in a format and nothing else."""
    return Int8Weights() if format == "int8" else WeightQuantization(format=format)


class W8A8(WeightFormat):
    """Weights and activations in 8 bits: half the bytes, and the device's 8-bit rate, which is twice the 16-bit one.

    Where a device has no such rate the weights are unpacked to 16 bits: `remarks` says so.
    """

    family = "compute less per step"
    title = "8-bit weights and activations"
    baseline = "bf16 weights and activations"
    gain_metric = "output_tokens_per_s"
    attacks = ("memory_weights", "compute", "link")
    meant_by = dict.fromkeys(("smoothquant", "int8", "w8a8int8"), "format: int8, method: smoothquant") | dict.fromkeys(
        ("fp8", "fp8weights", "w8a8fp8"), "format: fp8"
    )

    name: Literal["w8a8"] = "w8a8"
    format: Literal["fp8", "fp8_row", "fp8_block", "int8", "mxfp8"] = "fp8"
    method: QuantizationMethod = Field("rtn", description=_METHOD_HELP)

    @model_validator(mode="after")
    def _method_fits_the_format(self) -> W8A8:
        _check_method(self.method, PRECISIONS[self.format], PRECISIONS[_ACTIVATIONS[self.format]])
        return self

    def apply(self, setup: EngineSetup) -> EngineSetup:
        return _quantized(setup, PRECISIONS[self.format], PRECISIONS[_ACTIVATIONS[self.format]])

    @classmethod
    def suited(cls, hardware: HardwareSpec) -> Self:
        return cls(format="fp8" if hardware.computes_in("fp8") else "int8")

    @classmethod
    def advised(cls, model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism) -> Self | None:
        return None if hardware.kind == "cpu" else cls.suited(hardware)

    @property
    def quality(self) -> Quality:
        return _W8A8_INT8_QUALITY if self.format == "int8" else _W8A8_FP8_QUALITY


class Sparsity24(Technique):
    """Two of four weights are zero: 9/16 of the bytes at 16 bits, and twice the rate where the device has it."""

    layer = "weights"
    family = "move less data"
    title = "2:4 sparsity"
    baseline = "dense weights"
    lossless = False
    gain_metric = "tpot_s"
    attacks = ("memory_weights", "compute")
    meant_by = dict.fromkeys(("24", "24sparsity", "sparsity", "semistructuredsparsity"), "")

    name: Literal["sparsity_2_4"] = "sparsity_2_4"
    method: PruningMethod = Field(
        "magnitude",
        description="how the zeros are chosen: the smallest weights, or by calibration text with wanda and sparsegpt",
    )

    def apply(self, setup: EngineSetup) -> EngineSetup:
        plan, dense = setup.precision, setup.precision.weights
        if dense.sparse:
            raise MemboundError(f"weights are {dense.name} already, so that sparsity_2_4 changes nothing; leave it out")
        if dense.name in GGML_BLOCKS | GGML_MIXES or dense.values.startswith("nf") or dense.name.startswith("exl2"):
            raise MemboundError(
                f"{dense.name} weights cannot have 2:4 sparsity, because their blocks have no place for its indices; "
                "give bf16, int8, int4 or fp8 weights"
            )
        kept = {part: plan.weights_of(part) for part in ("embedding", "lm_head", "router")}
        return replace(setup, precision=replace(plan, weights=sparse24(dense), exceptions=_merged(plan, kept)))

    @property
    def quality(self) -> Quality:
        return _SPARSE_QUALITY


def _check_method(method: QuantizationMethod, weights: Precision, activations: Precision | None) -> None:
    """Raises ValueError where a method has no meaning for the formats."""
    integers = weights.values.startswith("int") and weights.name not in GGML_BLOCKS | GGML_MIXES
    if method in ("gptq", "awq") and not integers:
        raise ValueError(f"method '{method}' chooses integers, not {weights.name}; give a format such as int4_g64")
    both = activations is not None and weights.values == activations.values == "int8"
    if method in ("smoothquant", "llm_int8") and not both:
        raise ValueError(
            f"method '{method}' is for weights and activations in int8, not for {weights.name} weights and "
            f"{activations.name if activations else '16-bit'} activations; give int8 for both"
        )
    if method == "found" and weights.name not in GGML_BLOCKS | GGML_MIXES:
        raise ValueError(
            f"method 'found' keeps the blocks of a GGUF, not {weights.name}; give its format, such as q4_k_m"
        )
    if method == "quarot" and weights.width >= 16:
        raise ValueError("method 'quarot' rotates weights before they are rounded, and bf16 rounds none; leave it out")


def _weight_format(name: str) -> Precision:
    return parse_precision(name, "weights") or get_precision(name)


def _quantized(
    setup: EngineSetup, weights: Precision, activations: Precision, kept: dict[str, Precision] | None = None
) -> EngineSetup:
    """The set-up with these weights, but for the parts that are `kept` in others, else those that usually are.

    The cache stays what it is.
    """
    plan = setup.precision
    assert plan.weights.width >= 16 and not plan.weights.sparse, "engine_setup sets weights once, and first"
    kept = usual_exceptions(weights, plan.plain) if kept is None else kept
    quantized = replace(plan, weights=weights, activations=activations, exceptions=_merged(plan, kept))
    return replace(setup, precision=quantized)


def _merged(plan: PrecisionPlan, kept: dict[str, Precision]) -> tuple[tuple[str, Precision], ...]:
    return tuple((dict(plan.exceptions) | kept).items())
