"""Which models does the decoder compute? Everything else is refused before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from membound.roofline.models import GroupedQueryAttention, LatentAttention, ModelError, ModelSpec, MoeFfn
from membound.runtime.blocks.ffn import ACTIVATIONS

_UNCOMPUTED = ("lightning", "kda", "short_conv", "parallel")


def decoder_problem(spec: ModelSpec) -> str | None:
    """The first part of a model that the decoder does not compute, in one sentence; None for one that it does."""
    return next(_problems(spec), None)


def checked(spec: ModelSpec) -> ModelSpec:
    """The spec itself; raises ModelError for a model that the decoder does not compute."""
    if problem := decoder_problem(spec):
        raise ModelError(problem)
    return spec


def recurrent(spec: ModelSpec) -> bool:
    """Whether some layers keep a state in which all tokens before are merged, so that none can be taken back."""
    return any(group.attention.state_elements for group in spec.groups())


def _problems(spec: ModelSpec) -> Iterator[str]:
    def wrong(what: str, value: object, want: str) -> str:
        return f"{what} of {spec.name} is {value!r}, which this engine does not compute: it must be {want}."

    for group in spec.groups():
        mixer, ffn = group.attention, group.ffn
        if mixer.kind in _UNCOMPUTED:
            yield wrong("attention", mixer.kind, "of another kind")
        if isinstance(mixer, GroupedQueryAttention | LatentAttention) and mixer.indexer is not None:
            yield wrong("attention.indexer", "present", "absent")
        if isinstance(mixer, LatentAttention) and mixer.output_gate:
            yield wrong("attention.output_gate", True, "false")
        if isinstance(mixer, GroupedQueryAttention):
            if mixer.value_dim > mixer.head_dim:
                yield wrong("attention.v_head_dim", mixer.v_head_dim, f"no more than head_dim {mixer.head_dim}")
            for field in ("v_is_k", "qk_norm_bias", "shares_kv", "q_lora_rank"):
                if getattr(mixer, field):
                    yield wrong(f"attention.{field}", True, "false")
        if isinstance(ffn, MoeFfn) and ffn.zero_experts:
            yield wrong("ffn.zero_experts", ffn.zero_experts, "0")
        if mixer.kind == "none" and ffn.kind == "channel_mix":
            yield wrong("ffn", ffn.kind, "beside a mixer")
    for field in ("per_layer_input", "streams"):
        if getattr(spec, field) is not None:
            yield wrong(field, "present", "absent")
    if spec.norms_per_layer == 3:
        yield wrong("norms_per_layer", 3, "1, 2 or 4")
    if spec.activation not in ACTIVATIONS:
        yield wrong("activation", spec.activation, f"one of {', '.join(ACTIVATIONS)}")
