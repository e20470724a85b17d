"""What do tables, checkpoints and engine flags mean by their names of number formats?"""

from __future__ import annotations

import re
import reprlib

from membound.roofline.errors import MemboundError
from membound.roofline.precision import PRECISIONS, Precision, Role, get_precision, sparse24
from membound.roofline.precision.plan import PrecisionPlan, plan_of

_UNSTATED = ("", "-", "nan", "none", "auto", "unknown")
_SPELLINGS = {
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("float32", "float", "f32"), "fp32"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3", "float8"), "fp8"),
    **dict.fromkeys(("float8_e5m2", "e5m2"), "fp8_e5m2"),
    **dict.fromkeys(("fp8_channel", "fp8_dynamic"), "fp8_row"),
    **dict.fromkeys(("block_fp8", "fp8_blockwise"), "fp8_block"),
    **dict.fromkeys(("fp4", "float4", "nvfp4_wo", "w4a16_nvfp4", "w4a4_nvfp4"), "nvfp4"),
    **dict.fromkeys(("mxfp4_wo", "w4a16_mxfp4", "w4a8_mxfp4"), "mxfp4"),
    **dict.fromkeys(("int8_wo", "sq", "int8_sq", "smoothquant"), "int8"),
    **dict.fromkeys(("int4_wo", "gptq"), "int4"),
    "awq": "int4_g128_zero",
    **dict.fromkeys(("bnb", "bitsandbytes"), "nf4"),
    "bitnet": "ternary",
    # the short names of llama-quantize's file types are also those of block layouts
    **{short: f"{short}_m" for short in ("q2_k", "q3_k", "q4_k", "q5_k")},
}
_CACHE_SPELLINGS = {"int8": "int8_head", "int4": "int4_head_zero16", "kivi": "kivi2"}
# Activations that a weight format says by itself; with any other weights they stay in 16 bits.
_ACTIVATIONS_OF = {
    **dict.fromkeys(("fp8", "fp8_e5m2"), "fp8"),
    **{same: same for same in ("fp8_row", "nvfp4", "mxfp8", "mxfp6")},
    "fp8_block": "fp8_g128",
}
_SMOOTHQUANT = ("sq", "int8_sq", "smoothquant")
_SPARSE = ("2:4", "sparse")
_REMARKS = re.compile(
    r"awq|gptq|sq|g\d*|act|order|yes|no|sym|asym|zero|channel|row|per|dynamic|static|2:4|sparse|bpw"
    r"|small|medium|large|skip|sliding|window|layers|int8|dot|for|q4"
)
_WXAY = re.compile(r"w(\d+)a(\d+)(?:kv(\d+))?")


def parse_precision(text: str, role: Role = "weights") -> Precision | None:
    """The format that `text` means for weights, activations or a cache; None where it does not say.

    Understands the dtype columns of published tables (`int4(awq g128)`, `4.0 bpw`, `fp8 2:4 sparse`, `int8_wo`), the
    names of GGUF file types and the flags of vLLM, SGLang and TensorRT-LLM. Raises MemboundError for others.
    GPTQ's act-order adds 32 bits a column, which is left out: below 0.01 bits a weight.
    """
    if text.strip().lower() in _UNSTATED:
        return None
    name, *remarks = re.findall(r"[\w.:+]+", text.lower()) or [""]
    if stray := [word for word in remarks if not _REMARKS.fullmatch(word)]:
        raise MemboundError(f"{role} precision {reprlib.repr(text)} is not understood: '{stray[0]}' is no known remark")
    try:
        format = _format(name, [word for word in remarks if word not in _SPARSE], role)
    except MemboundError as error:
        raise MemboundError(f"{role} precision {reprlib.repr(text)} is not understood: {error}") from None
    return sparse24(format) if "2:4" in remarks else format


def _format(name: str, remarks: list[str], role: Role) -> Precision:
    if role == "activations":
        if name.endswith("_wo") or name.startswith("w4a16"):
            return PRECISIONS["bf16"]  # weight-only: the activations stay in 16 bits
        if "dot" in remarks:
            return PRECISIONS["q8_1"]  # llama.cpp multiplies quantized weights with blocks of 8-bit activations
        if name == "fp8_block":
            return PRECISIONS["fp8_g128"]
    if role == "kv" and name in _CACHE_SPELLINGS:
        return PRECISIONS[_CACHE_SPELLINGS[name]]
    if "bpw" in remarks:
        return get_precision(f"exl2_{name}")
    if match := _WXAY.fullmatch(name):
        return _of_width(int(match[("weights", "activations", "kv").index(role) + 1] or 16))
    if (match := re.fullmatch(r"int([1-8])", name)) and remarks and "sq" not in remarks:
        return _grouped(int(match[1]), remarks)
    if size := next((word for word in remarks if word in ("small", "medium", "large")), None):
        name = f"{name}_{size[0]}"
    return get_precision(_SPELLINGS.get(name, name))


def _grouped(bits: int, remarks: list[str]) -> Precision:
    """Integers in groups of 128 unless the remarks give another size; AWQ has zero points, GPTQ's are symmetric."""
    group = next((word[1:] for word in remarks if re.fullmatch(r"g\d*", word)), "128")
    whole_row = not group or bool({"channel", "row"} & {*remarks})
    zero = bool({"awq", "asym", "zero"} & {*remarks})
    size = "row" if whole_row or not group.strip("0") else f"g{group}"
    return get_precision(f"int{bits}_{size}{'_zero' if zero else ''}")


def _of_width(bits: int) -> Precision:
    return get_precision({16: "bf16", 32: "fp32"}.get(bits, f"int{bits}"))


def parse_plan(weights: str, activations: str = "", kv: str = "") -> PrecisionPlan:
    """The plan that the dtype columns of a table mean, with the exceptions that its weight format usually has.

    What is not stated follows from the weights where their name says it (`fp8` multiplies fp8, `sq` int8, `int4_wo`
    16 bits) and is 16 bits otherwise, which `assumed` then names. Raises MemboundError for a name it does not know.
    """
    w = parse_precision(weights, "weights")
    a = parse_precision(activations, "activations")
    cache = parse_precision(kv, "kv")
    unstated = {"weights": w is None, "activations": a is None, "kv": cache is None}
    w = w or (a if a and a.width >= 16 else PRECISIONS["bf16"])
    if a is None and not unstated["weights"]:
        a, unstated["activations"] = _activations_of(weights, w)
    if a is not None and a.name == "fp8" and w.name == "fp8_block":
        a = PRECISIONS["fp8_g128"]
    if a is not None and a.name == "q8_1" and w.width >= 16:
        a = w  # llama.cpp takes the 8-bit path for quantized weights only
    plan = plan_of(w, a, cache)
    exceptions = plan.exceptions
    if cache is not None and "skip sliding" in kv.lower():
        exceptions = (*exceptions, ("kv_sliding", plan.plain))
    assumed = tuple(name for name, missing in unstated.items() if missing)
    return PrecisionPlan(plan.weights, plan.activations, plan.kv, exceptions, assumed=assumed)


def _activations_of(text: str, weights: Precision) -> tuple[Precision, bool]:
    """What the name of a weight format says of the activations, and whether that is only assumed."""
    name = text.strip().lower()
    if name in _SMOOTHQUANT or name.replace(" ", "_") in _SMOOTHQUANT:
        return PRECISIONS["int8"], False
    if name.endswith("_wo") or _WXAY.match(name):
        found = parse_precision(text, "activations")
        return (found, False) if found else (PRECISIONS["bf16"], True)
    if weights.width >= 16:
        return weights, False
    base = weights.name.removesuffix("_sparse24")
    if base in _ACTIVATIONS_OF:
        return PRECISIONS[_ACTIVATIONS_OF[base]], False
    return PRECISIONS["bf16"], True
