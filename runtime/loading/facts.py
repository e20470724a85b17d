"""What does a config.json say about a model's arithmetic, beyond its shape?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from membound.roofline.models import LatentAttention, ModelError, ModelSpec
from membound.roofline.models.huggingface.facts import Config
from membound.runtime.arithmetic import Arithmetic, Routing
from membound.runtime.loading.layouts import Layout

# families whose routers score with sigmoids and balance by a bias
_SIGMOID = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
# `norm_topk_prob` where a config leaves it out, as transformers' config classes have it
_NORMALIZED = {"Qwen2MoeForCausalLM": False, "OlmoeForCausalLM": False, "DeepseekV2ForCausalLM": False}


def read_arithmetic(config: Mapping[str, Any], spec: ModelSpec, layout: Layout) -> Arithmetic:
    """The arithmetic of a config.json; raises ModelError with one sentence for one that is not computed."""
    c = Config(config, spec.name, spec.architecture or "")
    rope, scale = _rope(c, spec)
    side_by_side = c.flag("use_parallel_residual", default=True)
    fields: dict[str, Any] = {
        "placement": layout.placement if side_by_side or layout.placement != "parallel" else "before",
        "embedding_scale": spec.hidden**0.5 if layout.scaled_embedding else c.get("embedding_multiplier", default=1.0),
        "residual_scale": c.get("residual_multiplier", default=1.0),
        "logits_scale": c.get("logit_scale", default=1.0) / c.get("logits_scaling", default=1.0),
        "final_softcap": c.get("final_logit_softcapping"),
        "attention_softcap": c.get("attn_logit_softcapping"),
        "attention_scale": scale,
        "glu_limit": c.get("swiglu_limit"),
        "unrotated": _unrotated(c, spec),
        "routing": _routing(c, spec),
        **rope,
    }
    try:
        return Arithmetic(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelError(
            f"{where} of {spec.name} is {first['input']!r:.80}, which is not valid: {first['msg']}."
        ) from None


def _rope(c: Config, spec: ModelSpec) -> tuple[dict[str, Any], float | None]:
    """How rotations are scaled, and the scale of attention's scores where it is not that of the head."""
    mixer = spec.usual_attention
    asked = c.get("query_pre_attn_scalar")
    scale = c.get("attention_multiplier") if asked is None else asked**-0.5
    parameters = c.get("rope_parameters", default={})
    nested = isinstance(parameters.get("full_attention"), Mapping)
    full = parameters["full_attention"] if nested else (c.get("rope_scaling") or parameters)
    windowed = parameters.get("sliding_attention", {}).get("rope_theta") if nested else c.get("rope_local_base_freq")
    found: dict[str, Any] = {"windowed_rope_theta": windowed}
    kind = full.get("rope_type") or full.get("type") or "default"
    if kind in ("default", "llama3"):
        return found, scale
    if kind == "linear":
        return found | {"rope_scaling": {"kind": "linear", "factor": full.get("factor")}}, scale
    if kind != "yarn":
        raise ModelError(
            f"rope_scaling of {spec.name} is {kind!r}, which this engine does not compute: "
            "it must be null, linear, llama3 or yarn."
        )
    original = full.get("original_max_position_embeddings") or spec.max_context
    factor = full.get("factor") or spec.max_context / original
    of_all, of_turned = full.get("mscale_all_dim") or 0, full.get("mscale") or 0
    magnitude = full.get("attention_factor")
    if magnitude is None:
        both = of_all and of_turned
        magnitude = _yarn_magnitude(factor, of_turned) / _yarn_magnitude(factor, of_all) if both else None
    if isinstance(mixer, LatentAttention) and of_all:
        scale = mixer.qk_head_dim**-0.5 * _yarn_magnitude(factor, of_all) ** 2
    yarn = {
        "kind": "yarn",
        "factor": factor,
        "original_max_context": original,
        "beta_fast": full.get("beta_fast") or 32.0,
        "beta_slow": full.get("beta_slow") or 1.0,
        "magnitude": _yarn_magnitude(factor, 1.0) if magnitude is None else magnitude,
        "truncate": full.get("truncate", True),
    }
    return found | {"rope_scaling": yarn}, scale


def _yarn_magnitude(factor: float, weight: float) -> float:
    """By how much longer vectors make up for a longer context (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _unrotated(c: Config, spec: ModelSpec) -> tuple[int, ...]:
    """Layers without positions: SmolLM3 lists them with a 0, Cohere 2 has them where it sees everything."""
    if c.architecture == "Cohere2ForCausalLM":
        return tuple(i for i, layer in enumerate(spec.stack) if layer.attention.window is None)
    marks = c.layer_list("no_rope_layers") or []
    return tuple(i for i, turned in enumerate(marks) if not turned)


def _routing(c: Config, spec: ModelSpec) -> Routing:
    sigmoid = c.architecture in _SIGMOID or c.get("scoring_func") == "sigmoid"
    grouped = sigmoid or c.get("topk_method") == "group_limited_greedy"
    fields: dict[str, Any] = {
        "scores": "sigmoid" if sigmoid else "softmax",
        "bias": "selection" if sigmoid else "logits",
        "normalized": c.flag("norm_topk_prob", default=_NORMALIZED.get(c.architecture, True)),
        "scale": c.get("routed_scaling_factor", default=1.0),
    }
    if grouped and c.get("n_group", default=1) > 1:
        fields |= {"groups": c.get("n_group"), "group_top_k": c.get("topk_group", default=1)}
        fields |= {"group_score": "best_two" if sigmoid else "best"}
    return Routing(**fields)
