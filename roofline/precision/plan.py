"""Which number format has each part of a model, and what does the device multiply it in?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from membound.roofline.errors import MemboundError
from membound.roofline.precision import GGML_BLOCKS, GGML_MIXES, PRECISIONS, Precision, get_precision

if TYPE_CHECKING:
    from membound.roofline.hardware import HardwareSpec

# The parts of a model that quantization recipes tell apart. `kv_sliding` is the cache of sliding-window layers.
PARTS = ("embedding", "attention", "ffn", "experts", "shared_experts", "router", "lm_head", "draft_head", "kv_sliding")


@dataclass(frozen=True)
class PrecisionPlan:
    """Formats of weights, activations and KV cache, with the parts that have another weight format.

    The first and last `plain_first_layers` and `plain_last_layers` keep 16 bits. `assumed` names what nobody stated.
    """

    weights: Precision = PRECISIONS["bf16"]
    activations: Precision = PRECISIONS["bf16"]
    kv: Precision = PRECISIONS["bf16"]
    exceptions: tuple[tuple[str, Precision], ...] = ()
    plain_first_layers: int = 0
    plain_last_layers: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def plain(self) -> Precision:
        """The 16-bit format (or fp32) of what is not quantized: that of the activations, else of the weights."""
        return next((p for p in (self.activations, self.weights) if p.width >= 16), PRECISIONS["bf16"])

    def weights_of(self, part: str) -> Precision:
        """The weight format of a part of the model."""
        return dict(self.exceptions).get(part, self.weights)

    def activations_of(self, part: str) -> Precision:
        """What a part multiplies its weights with: 16 bits where its weights have them."""
        return self.activations if self.weights_of(part).width < 16 else self.plain

    def kv_of(self, *, sliding: bool = False) -> Precision:
        """The format of the cache of full or of sliding-window layers."""
        return dict(self.exceptions).get("kv_sliding", self.kv) if sliding else self.kv

    def keeps(self, layer: int, layers: int) -> bool:
        """Whether the layer with this index of so many keeps 16 bits."""
        return layer < self.plain_first_layers or layer >= layers - self.plain_last_layers

    def of_kept_layers(self) -> PrecisionPlan:
        """The plan of the layers that keep 16 bits; their caches are as all others."""
        caches = tuple(exception for exception in self.exceptions if exception[0] == "kv_sliding")
        return replace(self, weights=self.plain, activations=self.plain, exceptions=caches)


def plan_of(
    weights: str | Precision,
    activations: str | Precision | None = None,
    kv: str | Precision | None = None,
    *,
    exceptions: Mapping[str, str | Precision] | None = None,
    plain_first_layers: int = 0,
    plain_last_layers: int = 0,
) -> PrecisionPlan:
    """A plan with the exceptions that a weight format usually has; `exceptions` replaces single ones of them.

    Without `activations` they are 16 bits, the weights' own where those have 16 bits or more; without `kv` the cache
    has the 16 bits of the plan. Raises MemboundError for an unknown format or part.
    """
    w = _format(weights)
    a = _format(activations) if activations is not None else w if w.width >= 16 else PRECISIONS["bf16"]
    plain = next((p for p in (a, w) if p.width >= 16), PRECISIONS["bf16"])
    kept = usual_exceptions(w, plain)
    for part, format in (exceptions or {}).items():
        if part not in PARTS:
            raise MemboundError(f"precision exception '{part}' is unknown; parts are {', '.join(PARTS)}")
        kept[part] = _format(format)
    return PrecisionPlan(
        w, a, _format(kv) if kv is not None else plain, tuple(kept.items()), plain_first_layers, plain_last_layers
    )


def _format(format: str | Precision) -> Precision:
    return get_precision(format) if isinstance(format, str) else format


def usual_exceptions(weights: Precision, plain: Precision) -> dict[str, Precision]:
    """The parts that checkpoints in a weight format usually keep in another one.

    GPTQ, AWQ, bitsandbytes, llm-compressor and ModelOpt quantize the linears of the layers: tables and routers stay in
    16 bits. gpt-oss has only its experts in MXFP4. llama.cpp's mixes have tables in formats of their own and routers in
    fp32. ExLlamaV2 gives the head 6 bits unless asked otherwise.
    """
    base = weights.name.removesuffix("_sparse24")
    if weights.width >= 16:
        return {}
    if base in GGML_MIXES:
        mix = GGML_MIXES[base]
        tables = {"embedding": get_precision(mix.embedding), "lm_head": get_precision(mix.lm_head)}
        return {**tables, "router": PRECISIONS["fp32"]}
    if base in GGML_BLOCKS:
        head = weights if weights.bits >= PRECISIONS["q6_k"].bits else PRECISIONS["q6_k"]
        return {"embedding": weights, "lm_head": head, "router": PRECISIONS["fp32"]}
    kept: dict[str, Precision] = {"embedding": plain, "lm_head": plain, "router": plain}
    if base.startswith("exl2_"):
        kept["lm_head"] = get_precision("exl2_6.0")
    if base == "mxfp4":
        kept["attention"] = plain
    return kept


@dataclass(frozen=True)
class Compute:
    """What a device multiplies in: its dtype, the rate, and what has to happen to the operands before.

    `dequantizes`: weights are unpacked to `dtype` first. `emulated`: the device lacks the dtype that the formats ask
    for and multiplies in 16 bits instead. `sparse`: the rate is that of 2:4 sparsity.
    """

    dtype: str
    flops_per_s: float
    dequantizes: bool = False
    emulated: bool = False
    sparse: bool = False


def compute_dtype(
    weights: Precision, activations: Precision, hardware: HardwareSpec, *, emulate: bool = True
) -> Compute:
    """What `hardware` multiplies `weights` and `activations` in.

    The wider of the two decides: weight-only formats (W4A16) are unpacked to the activations' dtype and gain no rate;
    W8A8 and W4A4 multiply at the rate of their own dtype. Where the device lacks that, engines unpack to 16 bits (fp8
    checkpoints on Ampere), which is `emulated`; with `emulate=False` it is refused with MemboundError.
    """
    wider = weights if weights.width > activations.width else activations
    wanted = _multiplied(wider)
    dtype = hardware.computes_in(wanted)
    emulated = dtype is None and wider.width < 16
    if emulated:
        if not emulate:
            hardware.peak_flops(wanted)
        dtype = next((d for d in ("bf16", "fp16", "fp32") if hardware.computes_in(d)), None)
    if dtype is None:
        hardware.peak_flops(wanted)
    assert dtype is not None, "peak_flops refuses what computes_in does not know"
    sparse = weights.sparse and dtype in hardware.sparse_flops
    unpacks = _multiplied(weights) != dtype and weights.width < 16
    return Compute(dtype, hardware.peak_flops(dtype, sparse=sparse), unpacks, emulated, sparse)


def _multiplied(format: Precision) -> str:
    """The dtype that a format's values are multiplied as: integers of odd widths go up to the next that exists."""
    if format.values.startswith("int"):
        return "int4" if format.width <= 4 else "int8"
    return format.values
