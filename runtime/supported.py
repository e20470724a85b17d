"""Which models does the decoder compute? Everything else is refused before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelError, ModelSpec, OtherRopeScaling

# families whose weights have the names, the order and the arithmetic that the loaders and the decoder know
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def plain_decoder_problem(spec: ModelSpec) -> str | None:
    """The first thing that the decoder would compute wrongly, in one sentence; None for a model that it computes."""
    return next(_problems(spec), None)


def plain_attention(spec: ModelSpec) -> GroupedQueryAttention:
    """The attention of a model that the decoder computes; raises ModelError for any other model."""
    problem = plain_decoder_problem(spec)
    attention = spec.usual_attention
    if problem is not None or not isinstance(attention, GroupedQueryAttention):
        raise ModelError(problem or "")
    return attention


def _problems(spec: ModelSpec) -> Iterator[str]:
    def wrong(what: str, value: object, want: str) -> str:
        return f"{what} of {spec.name} is {value!r}, which this engine does not compute: it must be {want}."

    if spec.architecture not in (None, *_ARCHITECTURES):
        yield wrong("architecture", spec.architecture, f"one of {', '.join(_ARCHITECTURES)}")
    if len(spec.groups()) > 1:
        yield f"The layers of {spec.name} differ, which this engine does not compute: they must all be equal."
    attention, ffn = spec.usual_attention, spec.usual_ffn
    if not isinstance(attention, GroupedQueryAttention):
        yield wrong("attention", attention.kind, "gqa")
        return
    if not isinstance(ffn, GatedFfn):
        yield wrong("ffn", ffn.kind, "gated")
        return
    if attention.window is not None and attention.window < spec.max_context:
        yield wrong("attention.window", attention.window, "null, or no shorter than max_context")
    if attention.value_dim != attention.head_dim:
        yield wrong("attention.v_head_dim", attention.v_head_dim, f"head_dim {attention.head_dim}")
    if attention.qk_norm and attention.qk_norm_over != "head":
        yield wrong("attention.qk_norm_over", attention.qk_norm_over, "'head'")
    for field in ("o_bias", "output_gate", "sinks", "v_is_k", "qk_norm_bias"):
        if getattr(attention, field):
            yield wrong(f"attention.{field}", True, "false")
    if ffn.bias:
        yield wrong("ffn.bias", True, "false")
    if spec.norm != "rms" or spec.norms_per_layer != 2:
        yield wrong("norm", f"{spec.norms_per_layer} {spec.norm} a layer", "2 of kind rms")
    for field in ("embedding_norm", "position_rows", "lm_head_bias"):
        if getattr(spec, field):
            yield wrong(field, getattr(spec, field), "absent")
    if spec.activation != "silu":
        yield wrong("activation", spec.activation, "silu")
    if spec.rotary_fraction != 1:
        yield wrong("rotary_fraction", spec.rotary_fraction, "1.0")
    if isinstance(spec.rope_scaling, OtherRopeScaling):
        yield wrong("rope_scaling", spec.rope_scaling.rope_type, "null or llama3")
