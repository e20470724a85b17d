"""Of which operators does a step consist, and what does each compute and move?

Formulas are per operator call and count a multiply-add as two FLOPs. Sources: Williams et al., Roofline, CACM 2009;
Kaplan et al., Scaling Laws, 2020, appendix (FLOPs of a decoder); Ainslie et al., GQA, 2023 (KV bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from membound.roofline.models import ModelSpec
from membound.roofline.precision import Precision
from membound.roofline.shape import Count, StepShape
from membound.roofline.techniques import EngineSetup

Kind = Literal["linear", "attention", "rms_norm", "add_rms_norm", "rope_and_store", "silu_mul", "embed", "host"]


@dataclass(frozen=True)
class Operator:
    """One operator of a step: `calls` equal calls, each with these FLOPs and bytes.

    A linear has its shape [m, k] x [n, k]^T; the others have `elements`, what their time grows with besides bytes.
    """

    name: str
    kind: Kind
    calls: int
    flops: Count = 0.0
    weight_bytes: Count = 0.0
    kv_bytes: Count = 0.0
    activation_bytes: Count = 0.0
    m: Count = 0.0
    n: int = 0
    k: int = 0
    precision: Precision | None = None
    elements: Count = 0.0
    sequences: Count = 0.0
    logits: Count = 0.0

    @property
    def bytes(self) -> Count:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def linear(name: str, calls: int, m: Count, n: int, k: int, weights: Precision, activation_bytes: float) -> Operator:
    """y [m, n] = x [m, k] W^T: 2 m n k FLOPs; reads W once whatever m is."""
    return Operator(
        name,
        "linear",
        calls,
        flops=2.0 * m * n * k,
        weight_bytes=weights.matrix_bytes(n, k),
        activation_bytes=m * (n + k) * activation_bytes,
        m=m,
        n=n,
        k=k,
        precision=weights,
    )


def attention(model: ModelSpec, shape: StepShape, kv: Precision, activation_bytes: float) -> Operator:
    """Causal attention of all layers' calls: 4 heads head_dim FLOPs a query-key pair; reads each sequence's K and V."""
    a = model.attention
    per_token = a.kv_elements_per_token
    return Operator(
        "attention",
        "attention",
        model.layers,
        flops=4.0 * a.heads * a.head_dim * shape.attended,
        kv_bytes=kv.vector_bytes(per_token) * shape.kv_tokens,
        activation_bytes=2.0 * shape.tokens * a.heads * a.head_dim * activation_bytes,
        sequences=shape.sequences,
    )


def _elementwise(
    name: str, kind: Kind, calls: int, elements: Count, moved_bytes: Count, kv_bytes: Count = 0.0
) -> Operator:
    return Operator(name, kind, calls, kv_bytes=kv_bytes, activation_bytes=moved_bytes, elements=elements)


def step_operators(
    model: ModelSpec, setup: EngineSetup, shape: StepShape, activation_bytes: float = 4.0
) -> tuple[Operator, ...]:
    """The operators of one step in order; `activation_bytes` is what one activation takes (4 on a CPU, 2 on a GPU)."""
    t, layers, hidden, a = shape.tokens, model.layers, model.hidden, model.attention
    width = activation_bytes
    qkv, o, gate_up, down = (
        linear(name, layers, t, n, k, setup.weights, width) for name, n, k in model.layer_linears()
    )
    stored = setup.kv.vector_bytes(a.kv_elements_per_token) * t
    rope = t * (a.heads + 2 * a.kv_heads) * a.head_dim
    activated = t * model.ffn.intermediate
    return (
        _elementwise("embed", "embed", 1, t * hidden, t * hidden * (2 + width)),
        _elementwise("first_norm", "rms_norm", 1, t * hidden, 2 * t * hidden * width),
        qkv,
        _elementwise("rope_and_store", "rope_and_store", layers, rope, 2 * rope * width, stored),
        attention(model, shape, setup.kv, width),
        o,
        _elementwise("norms", "add_rms_norm", 2 * layers, t * hidden, 4 * t * hidden * width),
        gate_up,
        _elementwise("silu_mul", "silu_mul", layers, activated, 3 * activated * width),
        down,
        linear("lm_head", 1, shape.logits_rows, model.lm_head.n, model.lm_head.k, setup.weights, width),
        Operator("host", "host", 1, sequences=shape.sequences, elements=t, logits=shape.logits_rows * model.vocab),
    )


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes that a deployment holds: weights, KV cache, and the activations of its largest step."""

    weights_bytes: float
    kv_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.kv_bytes + self.activation_bytes


def weights_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes of all matrices at their precision, of an embedding apart from the lm_head in bf16, of norms in fp32."""
    matrices = sum(setup.weights.matrix_bytes(n, k) for _, n, k in model.layer_linears()) * model.layers
    head = setup.weights.matrix_bytes(model.lm_head.n, model.lm_head.k)
    shares_table = model.tie_embeddings and setup.weights.name == "bf16"
    table = 0.0 if shares_table else 2.0 * model.vocab * model.hidden
    vectors = 4.0 * (model.layers * (model.attention.vector_params + 2 * model.hidden) + model.hidden)
    return matrices + head + table + vectors


def step_weight_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes of weights that one step reads: every linear once and the lm_head; of the embedding only single rows."""
    return sum(float(op.weight_bytes) * op.calls for op in step_operators(model, setup, StepShape.decode(1, 1)))


def memory_breakdown(
    model: ModelSpec, setup: EngineSetup, kv_tokens: float, step_tokens: float, activation_bytes: float = 4.0
) -> MemoryBreakdown:
    """What a deployment holds with `kv_tokens` tokens cached and `step_tokens` in its largest step.

    Live activations at their peak: the residual and normed hidden states and the wider of the FFN's and the qkv's
    intermediates, plus fp32 logits of one row a sequence (bounded here by one a token).
    """
    widest = max(3 * model.ffn.intermediate, 2 * model.attention.qkv_rows)
    activations = step_tokens * (2 * model.hidden + widest) * activation_bytes + 4.0 * model.vocab * min(
        step_tokens, 64
    )
    return MemoryBreakdown(
        weights_bytes(model, setup), model.kv_bytes_per_token(setup.kv.bits) * kv_tokens, activations
    )
