"""What does a deployment hold in the memory of one device?"""

from __future__ import annotations

from dataclasses import dataclass

from membound.roofline.models import ModelSpec
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.shape import Count
from membound.roofline.techniques import EngineSetup

# Rows of logits that are held at a time at most: engines compute them for the last token of each sequence.
_LOGITS_ROWS = 64


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one device: weights, KV cache and recurrent states, and the activations of its largest step."""

    weights_bytes: float
    kv_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.kv_bytes + self.activation_bytes


def weights_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes on one device: matrices at their precision, an embedding apart from the lm_head, norms in fp32.

    A pipeline's stage holds its share of the layers; the tables count on each device that a stage's end has.
    """
    plan, parallel = setup.precision, setup.parallel
    layers = 0.0
    for group in model.groups():
        count, mixer, ffn = group.count, group.attention, group.ffn
        matrices = sum(
            plan.weights_of("attention").matrix_bytes(n, k) for _, n, k in mixer.linears(model.hidden, parallel.tp)
        )
        if isinstance(ffn, MoeFfn):
            for name, n, k in ffn.linears(model.hidden, parallel.tp):
                part = "router" if name == "router" else "shared_experts"
                matrices += plan.weights_of(part).matrix_bytes(n, k)
            one = sum(
                plan.weights_of("experts").matrix_bytes(n, k)
                for _, n, k in ffn.expert_linears(model.hidden, parallel.moe_tp)
            )
            matrices += one * ffn.experts / parallel.ep
        else:
            matrices += sum(
                plan.weights_of("ffn").matrix_bytes(n, k) for _, n, k in ffn.linears(model.hidden, parallel.tp)
            )
        layers += matrices * count
    head = plan.weights_of("lm_head").matrix_bytes(model.lm_head.n, model.lm_head.k) / parallel.tp
    embedding = plan.weights_of("embedding")
    shared = model.tie_embeddings and embedding == plan.weights_of("lm_head")
    table = 0.0 if shared else embedding.matrix_bytes(model.vocab + model.position_rows, model.hidden) / parallel.tp
    return layers / parallel.pp + head + table + 4.0 * model.vector_params / parallel.pp


def kv_bytes(model: ModelSpec, setup: EngineSetup, kv_tokens: Count, sequences: Count = 1.0) -> Count:
    """Bytes on one device of the caches of `kv_tokens` tokens in `sequences` sequences, and of their states.

    A sliding window keeps at most its length of each sequence. Latents of MLA and KV heads that tensor parallelism
    cannot split lie on each of its devices; data, pipeline and context parallelism divide the cache.
    """
    plan, parallel = setup.precision, setup.parallel
    total: Count = 0.0
    for group in model.groups():
        count, mixer = group.count, group.attention
        elements = mixer.kv_elements_on_gpu(parallel.tp)
        if elements:
            kept = kv_tokens if mixer.window is None else _at_most(kv_tokens, sequences * mixer.window)
            total = total + count * kept * plan.kv_of(sliding=mixer.window is not None).vector_bytes(elements)
        state = (
            mixer.state_elements_on_gpu(parallel.tp) * mixer.state_bits / 8 + 2.0 * mixer.conv_elements / parallel.tp
        )
        total = total + count * state * sequences
    index = model.index_bytes_per_token * kv_tokens
    return (total + index) / (parallel.pp * parallel.cp * parallel.dp)


def _at_most(value: Count, bound: Count) -> Count:
    import numpy as np

    return np.minimum(value, bound)


def memory_breakdown(
    model: ModelSpec,
    setup: EngineSetup,
    kv_tokens: float,
    step_tokens: float,
    activation_bytes: float = 4.0,
    sequences: float = 1.0,
) -> MemoryBreakdown:
    """What one device holds with `kv_tokens` tokens cached and `step_tokens` in its largest step.

    Live activations at their peak: the residual and normed hidden states and the widest intermediate, plus fp32 logits
    of one row a sequence.
    """
    tp = setup.parallel.tp
    widest = 0
    for group in model.groups():
        mixer, ffn = group.attention, group.ffn
        widest = max([widest, *(2 * n for _, n, _ in mixer.linears(model.hidden, tp))])
        if isinstance(ffn, MoeFfn):
            widest = max(widest, 2 * ffn.top_k * ffn.intermediate // setup.parallel.moe_tp)
        widest = max([widest, *(3 * n // 2 for _, n, _ in ffn.linears(model.hidden, tp))])
    activations = step_tokens / setup.parallel.dp * (2 * model.hidden + widest) * activation_bytes
    logits = 4.0 * model.vocab / tp * min(step_tokens, _LOGITS_ROWS)
    return MemoryBreakdown(
        weights_bytes(model, setup), float(kv_bytes(model, setup, kv_tokens, sequences)), activations + logits
    )
