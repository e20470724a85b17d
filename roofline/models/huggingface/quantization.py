"""In which formats does the `quantization_config` of a config.json say that a checkpoint is stored?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from membound.roofline.models.base import ModelError
from membound.roofline.models.checkpoint import Checkpoint
from membound.roofline.models.huggingface.mixed_formats import Formats, mixed_formats
from membound.roofline.models.spec import ModelSpec

Fields = Mapping[str, Any]

# Under which keys the methods list the modules that they leave in 16 bits.
_LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
# A matrix of each part, under the names that families give to it: the largest one where a part has several.
_MATRICES = {
    "attention": (
        "self_attn.o_proj",
        "self_attn.out_proj",
        "linear_attn.out_proj",
        "mixer.o_proj",
        "mixer.out_proj",
        "attn.wo_b",
    ),
    "ffn": ("mlp.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
    "experts": ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2", "mixer.experts.0.down_proj"),
    "shared_experts": (
        "mlp.shared_experts.down_proj",
        "mlp.shared_expert.down_proj",
        "mixer.shared_experts.down_proj",
    ),
}
# Gemma 4 has its experts beside the dense part, not within it.
_GEMMA4 = {"experts": ("experts.0.down_proj",), "shared_experts": ("mlp.down_proj",)}
_LAYER = re.compile(r"layers\.(\d+)(?=\.|$)")


def read_quantization(config: Fields, spec: ModelSpec, source: str) -> Checkpoint | None:
    """The checkpoint that `quantization_config` says a model has; None without one.

    Parts whose matrices stay in 16 bits in most layers do so in all of them, and no others. Raises ModelError with one
    sentence for a method that is not known, and for a format that membound has no name for.
    """
    fields, name = config.get("quantization_config"), spec.name
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise ModelError(f"quantization_config of {name} is {fields!r:.80}, which must be a mapping.")
    if fields.get("is_quantized") is False or fields.get("quant_method") == "none":
        return None
    method = str(fields.get("quant_method") or ("modelopt" if "quant_algo" in fields else "")).lower()
    # llm-compressor and ModelOpt write their schemes alike
    method = "modelopt" if "quant_algo" in fields and method in ("fp8", "compressed-tensors") else method
    if method not in _METHODS:
        raise ModelError(
            f"quant_method of the quantization_config of {name} is {method!r:.40}, which is not supported: "
            f"it must be one of {', '.join(_METHODS)}; without quantization_config the weights have 16 bits."
        )
    try:
        if of_module := _quantized_layers(fields):
            formats, parts, plain = mixed_formats(of_module, _matrices_of(spec), spec)
        else:
            formats, parts, plain = _METHODS[method](fields), (), _plain_parts(_left_out(fields), spec)
        return Checkpoint(
            weights=formats.weights, activations=formats.activations, parts=parts, plain=plain, source=source
        )
    except (ValueError, TypeError, AttributeError, LookupError, re.error) as error:
        # a ValidationError says in its first problem what a plain one says at once
        first = error.errors()[0]["msg"].removeprefix("Value error, ") if hasattr(error, "errors") else str(error)
        raise ModelError(f"quantization_config of {name} ({method}) cannot be read: {first.rstrip('.')}.") from None


# --- what each method says ---


def _fp8(fields: Fields) -> Formats:
    """DeepSeek's blocks, or a scale for each matrix."""
    block = fields.get("weight_block_size")
    return Formats(_fp8_blocks(block) if block is not None else "fp8")


def _fp8_blocks(block: Any) -> str:
    if list(block) != [128, 128]:
        raise ValueError(f"weight_block_size is {list(block)}; it must be [128, 128]")
    return "fp8_block"


def _awq(fields: Fields) -> Formats:
    return Formats(_integers(_bits(fields), _group(fields), zero=bool(fields.get("zero_point", True))), "bf16")


def _gptq(fields: Fields) -> Formats:
    return Formats(_integers(_bits(fields), _group(fields), zero=not fields.get("sym", True)), "bf16")


def _bits(fields: Fields) -> int:
    bits = next((fields[key] for key in ("bits", "w_bit", "num_bits") if fields.get(key) is not None), None)
    if bits is None:
        raise ValueError("the bits of a weight are missing")
    return int(bits)


def _group(fields: Fields) -> int:
    """Weights that share a scale along a row; 0 is the whole row."""
    group = next((fields[key] for key in ("group_size", "q_group_size") if fields.get(key) is not None), 128)
    return max(0, int(group))


def _integers(bits: int, group: int, *, zero: bool) -> str:
    return f"int{bits}_{f'g{group}' if group else 'row'}{'_zero' if zero else ''}"


def _bitsandbytes(fields: Fields) -> Formats:
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        return Formats("int8", "int8")
    # its fp4 has the layout of nf4: other values, as many bytes
    return Formats("nf4_dq" if fields.get("bnb_4bit_use_double_quant") else "nf4", "bf16")


def _compressed_tensors(fields: Fields) -> Formats:
    """llm-compressor's groups, of which all must have the same scheme."""
    schemes = [_scheme(group) for group in fields["config_groups"].values()]
    if not schemes:
        raise ValueError("config_groups is empty; it must hold a scheme")
    if len(set(schemes)) > 1:
        names = ", ".join(dict.fromkeys(scheme.weights for scheme in schemes))
        raise ValueError(f"config_groups mix {names}; they must have one format")
    (formats,) = set(schemes)
    sparsity = fields.get("sparsity_config") or {}
    sparse = sparsity.get("sparsity_structure") == "2:4" or fields.get("format") == "marlin-24"
    return formats._replace(weights=f"{formats.weights}_sparse24") if sparse else formats


def _scheme(group: Fields) -> Formats:
    weights, inputs = group["weights"], group.get("input_activations")
    return Formats(_tensor(weights), "bf16" if inputs is None else _inputs(inputs, weights))


def _tensor(weights: Fields) -> str:
    """The format of weights in the terms of compressed-tensors; without a strategy a group size decides."""
    bits, kind, size = _bits(weights), weights.get("type", "int"), weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if kind == "float":
        if bits == 4 and size in (16, 32):
            return "nvfp4" if size == 16 else "mxfp4"
        if bits == 8 and strategy == "block":
            return _fp8_blocks(weights.get("block_structure"))
        if bits == 8 and strategy in ("tensor", "channel"):
            return "fp8_row" if strategy == "channel" else "fp8"
        if bits == 8 and size == 32:
            return "mxfp8"
        raise ValueError(f"{bits}-bit floats by {strategy} of {size} are not known")
    zero = weights.get("symmetric") is False
    if bits == 8 and strategy in ("tensor", "channel") and not zero:
        return "int8"
    return _integers(bits, int(size) if strategy == "group" and size else 0, zero=zero)


def _inputs(inputs: Fields, weights: Fields) -> str:
    """The format of activations: scales run along the row, in the weights' groups where those have groups."""
    if inputs.get("type", "int") == "int":
        return f"int{_bits(inputs)}"
    if _bits(inputs) == 4:
        return _tensor({**inputs, "group_size": inputs.get("group_size") or weights.get("group_size")})
    strategy = inputs.get("strategy") or "tensor"
    return {"tensor": "fp8", "token": "fp8_row", "group": "fp8_g128"}.get(strategy, "fp8")


# TensorRT Model Optimizer's names of its algorithms
_ALGORITHMS = {
    "FP8": Formats("fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": Formats("fp8_row"),
    "FP8_PB_REAL": Formats("fp8_block"),
    "FP8_PB_WO": Formats("fp8_block", "bf16"),
    "FP8_BLOCK_SCALES": Formats("fp8_block"),
    "NVFP4": Formats("nvfp4"),
    "NVFP4_AWQ": Formats("nvfp4"),
    "W4A16_NVFP4": Formats("nvfp4", "bf16"),
    "MXFP4": Formats("mxfp4"),
    "W4A8_MXFP4_FP8": Formats("mxfp4", "fp8"),
    "MXFP8": Formats("mxfp8"),
    "W4A16": Formats("int4_g128", "bf16"),
    "W4A16_AWQ": Formats("int4_g128", "bf16"),
    "INT4_AWQ": Formats("int4_g128", "bf16"),
    "W4A8_AWQ": Formats("int4_g128", "fp8"),
    "W8A16": Formats("int8", "bf16"),
    "INT8_SQ": Formats("int8", "int8"),
    "W8A8_SQ_PER_CHANNEL": Formats("int8", "int8"),
}


def _modelopt(fields: Fields) -> Formats:
    algorithm = str(fields.get("quant_algo") or fields["quantization"]["quant_algo"]).upper()
    if algorithm == "MIXED_PRECISION":
        raise ValueError("quant_algo is MIXED_PRECISION and quantized_layers, which says of what, is missing")
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"quant_algo {algorithm} is not supported; it must be one such as FP8, NVFP4 or W4A16_AWQ")
    return _ALGORITHMS[algorithm]


def _quantized_layers(fields: Fields) -> dict[str, Formats]:
    """Of ModelOpt's MIXED_PRECISION: a format for each module by name. Some have that mapping twice deep."""
    layers: Fields = fields.get("quantized_layers") or fields.get("quantization", {}).get("quantized_layers") or {}
    return {name: _modelopt(one) for name, one in layers.get("quantized_layers", layers).items()}


_METHODS: dict[str, Callable[[Fields], Formats]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: Formats("fp8_row"),
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _gptq,
    "mxfp4": lambda _: Formats("mxfp4"),
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "bitnet": lambda _: Formats("ternary"),
}


# --- what stays in 16 bits ---


def _left_out(fields: Fields) -> list[str]:
    inner = fields.get("quantization")
    places = [fields, inner] if isinstance(inner, Mapping) else [fields]
    return [str(module) for place in places for key in _LEFT_OUT for module in place.get(key) or ()]


def _matrices_of(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    return _MATRICES | (_GEMMA4 if (spec.architecture or "").startswith("Gemma4") else {})


def _plain_parts(patterns: Iterable[str], spec: ModelSpec) -> tuple[str, ...]:
    """The parts of which the patterns leave out a matrix in more than half of the layers."""
    matrices_of = _matrices_of(spec)
    of_layer: dict[int | None, list[re.Pattern[str]]] = {}
    for pattern in patterns:
        number = None if pattern.startswith("re:") else _LAYER.search(pattern)
        of_layer.setdefault(int(number[1]) if number else None, []).append(_expression(pattern))
    counts = dict.fromkeys(matrices_of, 0)
    for layer in range(spec.layers):
        known = of_layer.get(None, []) + of_layer.get(layer, [])
        for part, matrices in matrices_of.items():
            names = [f"model.layers.{layer}.{matrix}" for matrix in matrices]
            counts[part] += any(pattern.search(name) for pattern in known for name in names)
    return tuple(part for part, count in counts.items() if 2 * count > spec.layers)


def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern of module names: `re:` an expression, else whole words between dots, with `*` for anything."""
    if pattern.startswith("re:"):
        return re.compile(rf"\A(?:{pattern.removeprefix('re:')})")
    words = re.sub(r"^.*?(?=\blayers\.)", "", pattern)
    return re.compile(rf"(?:^|\.){'.*'.join(map(re.escape, words.split('*')))}(?:\.|$)")
