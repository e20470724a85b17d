"""Which format has each part of a checkpoint that names one for every module?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from membound.roofline.models.ffn import MoeFfn
from membound.roofline.models.spec import ModelSpec
from membound.roofline.precision.names import parse_plan
from membound.roofline.precision.plan import PrecisionPlan


class Formats(NamedTuple):
    """Names of the formats of weights and of what is multiplied with them; None is what usually is."""

    weights: str
    activations: str | None = None


class Mixed(NamedTuple):
    """The formats of most weights, the weights of parts that have others, and the parts that have 16 bits."""

    formats: Formats
    parts: tuple[tuple[str, str], ...]
    plain: tuple[str, ...]


_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUTSIDE = {"lm_head": "lm_head", "embed_tokens": "embedding", "embeddings": "embedding"}


def mixed_formats(
    of_module: Mapping[str, Formats], matrices_of: Mapping[str, tuple[str, ...]], spec: ModelSpec
) -> Mixed:
    """The formats of parts, from those of modules by name.

    A part is what `matrices_of` says, the matrices that stand for it by their names within a layer: it has the format
    that most of its layers have for one of these, and 16 bits where most have none. Raises ValueError where parts are
    multiplied with inputs that no single format of activations gives.
    """
    found = _by_part(of_module, matrices_of, spec)
    quantized = {part: formats for part, formats in found.items() if formats is not None}
    if not quantized:
        raise ValueError("quantized_layers names no matrix of the model's layers")
    # A device multiplies in the wider format of the two operands, so the narrowest inputs serve all parts.
    plans = {formats: _plan(formats) for formats in quantized.values()}
    main = min(plans, key=lambda formats: plans[formats].activations.width)
    for part, formats in quantized.items():
        weights, own, inputs = plans[formats].weights, plans[formats].activations, plans[main].activations
        if max(weights.width, own.width) != max(weights.width, inputs.width):
            raise ValueError(
                f"{part} multiply {weights.name} with {own.name} where other parts have {inputs.name}; parts may "
                "differ in their weights, not in how wide their inputs are"
            )
    usual = plans[main].weights_of
    parts = [(part, formats.weights) for part, formats in quantized.items() if usual(part).name != formats.weights]
    return Mixed(main, tuple(parts), tuple(part for part, formats in found.items() if formats is None))


def _plan(formats: Formats) -> PrecisionPlan:
    return parse_plan(formats.weights, formats.activations or "")


def _by_part(
    of_module: Mapping[str, Formats], matrices_of: Mapping[str, tuple[str, ...]], spec: ModelSpec
) -> dict[str, Formats | None]:
    """Of the parts that the model has; tables only where they are named."""
    parts_of = {matrix: part for part, matrices in matrices_of.items() for matrix in matrices}
    of_layer: dict[str, dict[int, Formats]] = {part: {} for part in matrices_of}
    outside: dict[str, Formats | None] = {}
    for module, formats in of_module.items():
        if inside := _IN_LAYER.search(module):
            if part := parts_of.get(inside[2]):
                of_layer[part][int(inside[1])] = formats
        elif part := _OUTSIDE.get(module.rsplit(".", 1)[-1]):
            outside[part] = formats
    layers = _layers_of_parts(spec)
    return outside | {
        part: Counter(of_layer[part].values()).most_common(1)[0][0] if 2 * len(of_layer[part]) > layers[part] else None
        for part in matrices_of
        if layers[part]
    }


def _layers_of_parts(spec: ModelSpec) -> dict[str, int]:
    """How many layers have each part."""
    layers: Counter[str] = Counter()
    for group in spec.groups():
        layers["attention"] += group.count if group.attention.kind != "none" else 0
        if isinstance(group.ffn, MoeFfn):
            layers["experts"] += group.count
            layers["shared_experts"] += group.count if group.ffn.shared_intermediate else 0
        elif group.ffn.kind != "none":
            layers["ffn"] += group.count
    return layers
