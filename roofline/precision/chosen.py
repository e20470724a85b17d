"""In which formats are weights, activations and cache of an operating point, and who says so?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from membound.roofline.models import ModelSpec
from membound.roofline.precision.plan import PrecisionPlan

# Whether the weights are those of the published checkpoint, of a technique, or 16 bits as nothing says otherwise.
Said = Literal["published", "technique", "plain"]


@dataclass(frozen=True)
class Formats:
    """Formats by name; `parts` are those of the weights by part, `published` is the checkpoint's, None for 16 bits."""

    weights: str
    activations: str
    kv: str
    kv_sliding: str
    parts: dict[str, str]
    said: Said
    published: str | None

    @classmethod
    def of(cls, model: ModelSpec, plan: PrecisionPlan, parts: tuple[str, ...], activation_bytes: float) -> Formats:
        """Those of `parts` of a model; an engine that computes in 4 bytes has what is not quantized in fp32."""
        published = model.published
        activations = plan.activations.name
        if plan.activations.width == 16 and activation_bytes == 4.0:
            activations = "fp32"
        windows = any(mixer.window is not None for group in model.groups() for mixer in group.mixers)
        return cls(
            weights=plan.weights.name,
            activations=activations,
            kv=plan.kv.name,
            kv_sliding=plan.kv_of(sliding=windows).name,
            parts={part: _format(plan, part) for part in parts},
            said=_said(plan, published, quantized=model.checkpoint is not None),
            published=model.checkpoint.weights if model.checkpoint else None,
        )

    @property
    def words(self) -> str:
        """`weights fp8_block (as published), activations fp8 per 128, cache bf16; router, lm_head, embedding bf16`."""
        published = "" if self.published is None or self.said == "published" else f", published in {self.published}"
        said = {
            "published": "as published",
            "technique": f"by a technique{published}",
            "plain": "as nothing quantizes them",
        }[self.said]
        activations = re.sub(r"_g(\d+)$", r" per \1", self.activations)
        cache = self.kv if self.kv == self.kv_sliding else f"{self.kv} ({self.kv_sliding} in windows)"
        others: dict[str, list[str]] = {}
        for part, format in self.parts.items():
            if format != self.weights and part not in ("vectors", "idle"):
                others.setdefault(format, []).append(part)
        named = "".join(f"; {', '.join(parts)} {format}" for format, parts in others.items())
        return f"weights {self.weights} ({said}), activations {activations}, cache {cache}{named}"

    def to_json(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "activations": self.activations,
            "kv": self.kv,
            "kv_sliding": self.kv_sliding,
            "parts": self.parts,
            "said_by": self.said,
            "published": self.published,
            "words": self.words,
        }


def _said(plan: PrecisionPlan, published: PrecisionPlan, *, quantized: bool) -> Said:
    as_published = plan.weights == published.weights and dict(plan.exceptions) == dict(published.exceptions)
    if as_published:
        return "published" if quantized else "plain"
    return "technique"


def _format(plan: PrecisionPlan, part: str) -> str:
    """Of what no step reads nothing is quantized, and vectors are in fp32."""
    return {"vectors": "fp32", "idle": plan.plain.name}.get(part) or plan.weights_of(part).name
