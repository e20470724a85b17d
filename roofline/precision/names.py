"""What do tables, checkpoints and engine flags mean by their names of number formats?"""

from __future__ import annotations

import re
import reprlib

from membound.roofline.errors import MemboundError
from membound.roofline.precision import PRECISIONS, Precision, Role, get_precision, sparse24
from membound.roofline.precision.plan import PrecisionPlan, plan_of

_UNSTATED = ("", "-", "nan", "none", "auto", "unknown", "n/a", "na", "default", "model", "same")
_SPELLINGS = {
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half", "f16", "q0f16"), "fp16"),
    **dict.fromkeys(("float32", "float", "f32", "q0f32"), "fp32"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn", "float8_e4m3", "e4m3", "float8", "w8a8_fp8"), "fp8"),
    **dict.fromkeys(("float8wo", "float8dq", "fp8_wo", "fp8_static"), "fp8"),
    **dict.fromkeys(("float8_e5m2", "e5m2"), "fp8_e5m2"),
    **dict.fromkeys(("fp8_channel", "fp8_dynamic"), "fp8_row"),
    **dict.fromkeys(("block_fp8", "fp8_blockwise"), "fp8_block"),
    **dict.fromkeys(("fp4", "float4", "nvfp4_wo", "w4a16_nvfp4", "w4a4_nvfp4"), "nvfp4"),
    **dict.fromkeys(("mxfp4_wo", "w4a16_mxfp4", "w4a8_mxfp4"), "mxfp4"),
    **dict.fromkeys(("int8_wo", "sq", "int8_sq", "smoothquant"), "int8"),
    **dict.fromkeys(("int8wo", "int8dq", "w8a8_int8", "eetq"), "int8"),
    **dict.fromkeys(("int4_wo", "int4wo", "uint4", "gptq", "gptq_marlin", "marlin", "hqq", "autoround"), "int4"),
    **dict.fromkeys(("awq", "awq_marlin"), "int4_g128_zero"),
    "w4afp8": "int4",
    **dict.fromkeys(("bnb", "bitsandbytes"), "nf4"),
    "nf4+dq": "nf4_dq",
    **dict.fromkeys(("bitnet", "1.58bit", "1.58"), "ternary"),
    # Unsloth's dynamic files give some tensors more bits than the file type of the name, which is not counted
    **{f"q{bits}_k_xl": f"q{bits}_k_m" for bits in (2, 3, 4, 5)},
    # the short names of llama-quantize's file types are also those of block layouts
    **{short: f"{short}_m" for short in ("q2_k", "q3_k", "q4_k", "q5_k")},
}
# ExLlama's caches have a scale for 32 numbers (from memory), as llama.cpp's blocks do.
_CACHE_SPELLINGS = {"int8": "int8_head", "int4": "int4_head_zero16", "kivi": "kivi2", "q8": "q8_0", "q4": "q4_0"}
# Activations that a weight format says by itself; with any other weights they stay in 16 bits.
_ACTIVATIONS_OF = {
    **dict.fromkeys(("fp8", "fp8_e5m2"), "fp8"),
    **{same: same for same in ("fp8_row", "nvfp4", "mxfp8", "mxfp6")},
    "fp8_block": "fp8_g128",
}
_FP8_ACTIVATIONS = ("w4afp8",)
_SMOOTHQUANT = ("sq", "int8_sq", "smoothquant", "int8dq")
_WEIGHT_ONLY = re.compile(r".*\d_?wo")
_SPARSE = ("2:4", "sparse")
# How weights were quantized, which changes neither their bits nor the kernel's kind beyond what the rest says.
_METHODS = re.compile(r"awq|gptq|exl[23]|hqq|eetq|marlin|machete|autoround|aqlm|qtip|quip|spqr|qserve|qoq|rtn|bnb")
_REMARKS = re.compile(
    rf"{_METHODS.pattern}|sq|g\d*|act|order|yes|no|sym|asym|symmetric|asymmetric|zero|channel|row|token|tensor|per"
    r"|dynamic|static|2:4|sparse|bpw|block|blockwise|wise|128x128|e4m3|e4m3fn|weight|weights|only|wo"
    r"|e5m2|small|medium|large|skip|sliding|window|layers|int8|dot|for|q4|kv|cache|moe|experts|double|quant|qat"
)
# Remarks that leave open whether integers have a scale a group or one a row.
_OF_NO_GROUP = re.compile(r"weights?|only|wo|kv|cache|moe|experts|sq")
_IN_BLOCKS = ("block", "blockwise", "128x128")
_WXAY = re.compile(r"w(\d+)a(\d+)(?:kv(\d+))?")
# MLC's names: bits of a weight, of an activation, and a variant of the layout; groups of 32 (mlc-llm's documentation,
# section "Compile Model", from memory).
_MLC = re.compile(r"q([2348])f(?:16|32)(?:_\d|_ft)?")


def parse_precision(text: str, role: Role = "weights") -> Precision | None:
    """The format that `text` means for weights, activations or a cache; None where it does not say.

    Understands the dtype columns of published tables (`int4(awq g128)`, `AWQ 4-bit`, `4.0 bpw`, `fp8 2:4 sparse`,
    `int8_wo`, `q4f16_1`), the names of GGUF file types and the flags of vLLM, SGLang and TensorRT-LLM. Raises
    MemboundError for others. GPTQ's act-order adds 32 bits a column, which is left out: below 0.01 bits a weight.
    """
    if text.strip().lower() in _UNSTATED:
        return None
    name, *remarks = _words(text, role) or [""]
    if stray := [word for word in remarks if not _REMARKS.fullmatch(word)]:
        raise MemboundError(f"{role} precision {reprlib.repr(text)} is not understood: '{stray[0]}' is no known remark")
    try:
        format = _format(name, [word for word in remarks if word not in _SPARSE], role)
    except MemboundError as error:
        if name == text.strip().casefold():
            raise MemboundError(f"{role} {error}") from None
        raise MemboundError(f"{role} precision {reprlib.repr(text)} is not understood: {error}") from None
    return sparse24(format) if "2:4" in remarks else format


def _words(text: str, role: Role) -> list[str]:
    """The words of a format's name with the one that names the format of `role` first, whatever stood before it."""
    spelled = re.sub(r"^(?:torch\.|ud-)", "", text.lower().strip())
    spelled = re.sub(r"(\d) ?bpw\b", r"\1 bpw", spelled)
    spelled = re.sub(r"\bblock[ _-]?(?:size)?[ =:_-]?(\d+)\b", "block", spelled)
    spelled = re.sub(r"\b(int\d_?wo)-(\d+)\b", r"\1 g\2", spelled)  # torchao's int4wo-128
    spelled = re.sub(r"^kv(\d+)$", r"int\1", spelled)
    spelled = re.sub(r"(?<![.\w])([1-8])[- ]?bits?\b", r"int\1", spelled)
    spelled = re.sub(r"\b(?:g|gs|group)[ _-]?(?:size)?[ =:_-]?(\d+)\b", r"g\1", spelled)
    words = re.findall(r"[\w.:+]+", spelled)
    named = [word for word in words if _is_a_format(word)]
    pair = next((found for word in words if (found := _WXAY.fullmatch(word))), None)
    if pair and named:  # `w8a8 (fp8)`: both; `w4a8 (fp8)`: the activations alone
        bits = int(pair[_ROLES.index(role) + 1] or 16)
        first = next((word for word in named if _width(word) == bits), pair[0])
        return [first, *(word for word in words if word != pair[0] and word not in named)]
    if words and _REMARKS.fullmatch(words[0]) and (named or "bpw" in words[2:]):
        first = named[0] if named else words[words.index("bpw") - 1]
        words.remove(first)
        return [first, *words]
    return words


_ROLES: tuple[Role, ...] = ("weights", "activations", "kv")


def _is_a_format(word: str) -> bool:
    named = word in PRECISIONS or bool(re.fullmatch(r"int[1-8]", word))
    return named or (word in _SPELLINGS and not _METHODS.fullmatch(word))


def _width(word: str) -> int:
    integer = re.fullmatch(r"int([1-8])", word)
    return int(integer[1]) if integer else get_precision(_SPELLINGS.get(word, word)).width


def _format(name: str, remarks: list[str], role: Role) -> Precision:
    if role == "activations":
        if _WEIGHT_ONLY.fullmatch(name) or name.startswith("w4a16"):
            return PRECISIONS["bf16"]  # weight-only: the activations stay in 16 bits
        if name in _FP8_ACTIVATIONS:
            return PRECISIONS["fp8"]
        if "dot" in remarks:
            return PRECISIONS["q8_1"]  # llama.cpp multiplies quantized weights with blocks of 8-bit activations
        if name == "fp8_block":
            return PRECISIONS["fp8_g128"]
    if role == "kv" and name in _CACHE_SPELLINGS:
        return PRECISIONS[_CACHE_SPELLINGS[name]]
    if "bpw" in remarks:
        return get_precision(f"exl2_{name}")
    if name == "fp8" and "e5m2" in remarks:
        return PRECISIONS["fp8_e5m2"]
    if name in ("fp8", "e4m3") and {*_IN_BLOCKS} & {*remarks}:
        return PRECISIONS["fp8_block" if role == "weights" else "fp8_g128"]
    if match := _MLC.fullmatch(name):
        return PRECISIONS["bf16"] if role != "weights" else get_precision(f"int{match[1]}_g32")
    if match := _WXAY.fullmatch(name):
        return _of_width(int(match[_ROLES.index(role) + 1] or 16))
    if (match := re.fullmatch(r"int([1-8])", name)) and not all(map(_OF_NO_GROUP.fullmatch, remarks)):
        return _grouped(int(match[1]), remarks)
    if name == "nf4" and "double" in remarks:
        return PRECISIONS["nf4_dq"]
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
    name = {16: "bf16", 32: "fp32"}.get(bits, f"int{bits}")
    return get_precision(name if name in PRECISIONS else f"{name}_g128")


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
    if _WEIGHT_ONLY.fullmatch(name) or _WXAY.search(name) or name in _FP8_ACTIVATIONS:
        found = parse_precision(text, "activations")
        return (found, False) if found else (PRECISIONS["bf16"], True)
    if weights.width >= 16:
        return weights, False
    base = weights.name.removesuffix("_sparse24")
    if base in _ACTIVATIONS_OF:
        return PRECISIONS[_ACTIVATIONS_OF[base]], False
    return PRECISIONS["bf16"], True
