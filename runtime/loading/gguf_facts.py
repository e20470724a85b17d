"""What do a GGUF's metadata say about a model's arithmetic, beyond its shape?

Where they are silent, llama.cpp has the value in its code; it is taken from there (`src/llama-model.cpp`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from membound.roofline.models import LatentAttention, ModelError, ModelSpec
from membound.runtime.arithmetic import Arithmetic
from membound.runtime.loading.layouts import Layout

# Gemma 2 and 3 in their largest size scale scores by the share of a head in the hidden state, by their layers
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
_SIGMOID = 2  # `expert_gating_func`


def read_gguf_arithmetic(fields: Mapping[str, Any], spec: ModelSpec, layout: Layout) -> Arithmetic:
    """The arithmetic of a GGUF; raises ModelError with one sentence for one that is not computed."""
    arch = str(fields["general.architecture"])

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{key}", default)

    found: dict[str, Any] = {
        "placement": layout.placement,
        "embedding_scale": spec.hidden**0.5 if layout.scaled_embedding else 1.0,
        "logits_scale": get("logit_scale", 1.0),
        "final_softcap": get("final_logit_softcapping"),
        "attention_softcap": get("attn_logit_softcapping"),
        "glu_limit": 7.0 if arch == "gpt-oss" else None,
    }
    if _SCALED_BY_HIDDEN.get(arch) == spec.layers:
        found["attention_scale"] = (spec.hidden / getattr(spec.usual_attention, "heads", 1)) ** -0.5
    if arch == "gemma3":
        found["windowed_rope_theta"] = get("rope.freq_base_swa", 10000.0)
    if spec.mixtures:
        found["routing"] = _routing(get, arch)
    try:
        return Arithmetic(**found | _scaling(get, arch, spec))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        shown = f"{where} of {spec.name} is {first['input']!r:.80}"
        raise ModelError(f"{shown}, which is not valid: {first['msg']}.") from None


def _scaling(get: Any, arch: str, spec: ModelSpec) -> dict[str, Any]:
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_scaling": {"kind": "linear", "factor": factor}}
    if kind != "yarn":
        raise ModelError(
            f"{arch}.rope.scaling.type of {spec.name} is {kind!r}, which this engine does not compute: "
            "it must be none, linear or yarn."
        )
    yarn = {
        "kind": "yarn",
        "factor": factor,
        "original_max_context": get("rope.scaling.original_context_length", spec.max_context),
        "magnitude": 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0,
        "truncate": arch != "gpt-oss",
    }
    mixer = spec.usual_attention
    if isinstance(mixer, LatentAttention):
        # DeepSeek scales the scores instead of the vectors; the metadata hold a tenth of `mscale_all_dim`
        longer = 1.0 + get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(factor)
        scale = mixer.qk_head_dim**-0.5 * longer**2
        return {"rope_scaling": yarn | {"magnitude": 1.0}, "attention_scale": scale}
    return {"rope_scaling": yarn}


def _routing(get: Any, arch: str) -> dict[str, Any]:
    sigmoid = get("expert_gating_func") == _SIGMOID
    groups = get("expert_group_count", 1) or 1
    found: dict[str, Any] = {
        "scores": "sigmoid" if sigmoid else "softmax",
        "bias": "selection" if sigmoid else "logits",
        "normalized": bool(get("expert_weights_norm", arch not in ("qwen2moe", "deepseek2"))),
        "scale": get("expert_weights_scale", 1.0) or 1.0,
    }
    if groups > 1:
        group_score = "best_two" if sigmoid else "best"
        found |= {"groups": groups, "group_top_k": get("expert_group_used_count", 1), "group_score": group_score}
    return found
