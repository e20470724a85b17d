"""What does a deployment hold in the memory of one device?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from membound.roofline.models import ModelSpec
from membound.roofline.models.attention import GroupedQueryAttention, LatentAttention
from membound.roofline.models.base import TokenMixer
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.planned import planned_groups
from membound.roofline.precision import PRECISIONS, Precision
from membound.roofline.precision.plan import PrecisionPlan
from membound.roofline.shape import Count
from membound.roofline.techniques import EngineSetup

# What engines take of a device's memory; the rest is for what else runs there (vLLM's `gpu_memory_utilization`).
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one device: weights, KV cache and recurrent states, and the activations of its largest step."""

    weights_bytes: float
    kv_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.kv_bytes + self.activation_bytes


def weights_by_part(model: ModelSpec, setup: EngineSetup) -> dict[str, float]:
    """Bytes on one device by part of the model: matrices at their precision, `vectors` (norms and the like) in fp32.

    A pipeline's stage holds its share of the layers; the tables count on each device that a stage's end has. An
    embedding that is the lm_head too, in the same format, counts there.
    """
    plan, parallel = setup.precision, setup.parallel
    parts: dict[str, float] = {}

    def add(part: str, n: int, k: int, matrices: float, formats: PrecisionPlan = plan) -> None:
        parts[part] = parts.get(part, 0.0) + formats.weights_of(part).matrix_bytes(n, k) * matrices

    for group, formats in planned_groups(model, plan):
        count, mixer, ffn = group.count / parallel.pp, group.attention, group.ffn
        for _, n, k in mixer.linears(model.hidden, parallel.tp):
            add("attention", n, k, count, formats)
        for part in group.mixers:
            if isinstance(part, LatentAttention) and setup.absorbed_mla:
                # Halves of kv_b that are unpacked once, in 16 bits, for decode; kv_b itself stays for prompts.
                heads = part.heads_on_gpu(parallel.tp)
                for _, n, k in part.absorbed_linears():
                    parts["attention"] += plan.plain.matrix_bytes(heads * n, k) * count
        for name, n, k in ffn.linears(model.hidden, parallel.tp):
            routing = "router" if name == "router" else "shared_experts"
            add(routing if isinstance(ffn, MoeFfn) else "ffn", n, k, count, formats)
        if isinstance(ffn, MoeFfn):
            held = ffn.experts + (setup.redundant_experts or 0)
            if setup.expert_storage is not None:
                held = min(ffn.experts, setup.expert_storage.cached)
            for _, n, k in ffn.expert_linears(model.hidden, parallel.moe_tp):
                add("experts", n, k, count * held / parallel.ep, formats)
    for beside in model.besides:
        for _, n, k in beside.layer_linears(model.hidden):
            add("ffn", n, k, model.layers / parallel.pp)
        for _, n, k in beside.step_linears(model.hidden, model.layers):
            add("ffn", n, k, 1.0)
        rows, columns = beside.table(model.layers)
        if rows:
            add("embedding", rows, columns, 1.0 / parallel.tp)
    if model.idle_params:
        parts["idle"] = plan.plain.bits / 8 * model.idle_params / parallel.tp
    add("lm_head", model.lm_head.n, model.lm_head.k, 1.0 / parallel.tp)
    if not (model.tie_embeddings and plan.weights_of("embedding") == plan.weights_of("lm_head")):
        add("embedding", model.vocab + model.position_rows, model.hidden, 1.0 / parallel.tp)
    parts["vectors"] = 4.0 * model.vector_params / parallel.pp
    return parts


def weights_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes of all weights on one device."""
    return sum(weights_by_part(model, setup).values())


@dataclass(frozen=True)
class CacheTerms:
    """What sequences leave in the memory of one device: bytes a cached token with the window that bounds them, and
    bytes a sequence whatever its length (recurrent states, inputs of convolutions)."""

    per_token: tuple[tuple[float, int | None], ...]
    state_bytes: float

    def __add__(self, other: CacheTerms) -> CacheTerms:
        """Both caches, of the same sequences."""
        return CacheTerms(self.per_token + other.per_token, self.state_bytes + other.state_bytes)

    def bytes(self, kv_tokens: Count, sequences: Count = 1.0) -> Count:
        """Bytes of `kv_tokens` tokens in `sequences` sequences, which are taken to be equally long."""
        total: Count = self.state_bytes * sequences
        for each, window in self.per_token:
            total = total + each * (kv_tokens if window is None else _at_most(kv_tokens, sequences * window))
        return total


def _at_most(value: Count, bound: Count) -> Count:
    """The smaller of the two, elementwise for arrays; a pair of numbers is compared without numpy's overhead."""
    if isinstance(value, float | int) and isinstance(bound, float | int):
        return min(value, bound)
    return np.minimum(value, bound)


def cache_terms(model: ModelSpec, setup: EngineSetup) -> CacheTerms:
    """The bytes of caches and states of sequences on each device of the data-parallel rank that they live on.

    A sliding window keeps at most its length of each sequence, and so does a budget that evicts. A format with a window
    has the newest tokens in 16 bits; Quest has the least and the largest key of each page, in 16 bits too. Latents of
    MLA and KV heads that tensor parallelism cannot split lie on each of its devices; pipeline parallelism divides the
    cache, context parallelism its tokens, and not states, which have none. Data parallelism divides the sequences: all
    of one lies on one rank.
    """
    plan, parallel = setup.precision, setup.parallel
    divided = parallel.pp * parallel.cp
    by_window: dict[int | None, float] = {}
    states = 0.0
    for count, mixer in ((group.count, mixer) for group in model.groups() for mixer in group.mixers):
        if mixer.kv_elements_on_gpu(parallel.tp):
            format, budget = plan.kv_of(sliding=mixer.window is not None), setup.budget_of(mixer.kind)
            layers = count / divided
            seen = _shorter(mixer.window, budget.tokens if budget is not None and budget.evicts else None)
            each = cached_token_bytes(mixer, format, parallel.tp)
            by_window[seen] = by_window.get(seen, 0.0) + each * layers
            if format.window:
                newest = _shorter(seen, format.window)
                more = cached_token_bytes(mixer, PRECISIONS["bf16"], parallel.tp) - each
                by_window[newest] = by_window.get(newest, 0.0) + more * layers
            if budget is not None and isinstance(mixer, GroupedQueryAttention) and not budget.evicts:
                by_window[seen] += page_bytes(mixer, parallel.tp) / budget.page * layers
        state = mixer.state_elements_on_gpu(parallel.tp) * mixer.state_bits / 8
        states += count * (state + 2.0 * mixer.conv_elements / parallel.tp) / parallel.pp
    if index := model.index_bytes_per_token:
        by_window[None] = by_window.get(None, 0.0) + index / divided
    return CacheTerms(tuple((each, window) for window, each in by_window.items()), states)


def cached_token_bytes(mixer: TokenMixer, format: Precision, tp: int) -> float:
    """Bytes of one token in the cache of one layer on one of `tp` devices: K and V of its heads, or its latent."""
    if isinstance(mixer, GroupedQueryAttention):
        kv_heads = 0 if mixer.shares_kv else mixer.heads_on_gpu(tp)[1]
        return kv_heads * (format.head_bytes(mixer.head_dim) + format.head_bytes(mixer.value_dim))
    return format.head_bytes(mixer.kv_elements_on_gpu(tp))


def page_bytes(mixer: GroupedQueryAttention, tp: int) -> float:
    """Bytes of what Quest knows of a page in one layer: the least and the largest element of each channel's keys."""
    return mixer.heads_on_gpu(tp)[1] * 2.0 * PRECISIONS["bf16"].head_bytes(mixer.head_dim)


def _shorter(one: int | None, other: int | None) -> int | None:
    return min((window for window in (one, other) if window is not None), default=None)


def kv_bytes(model: ModelSpec, setup: EngineSetup, kv_tokens: Count, sequences: Count = 1.0) -> Count:
    """Bytes on each device of a rank of the caches of its `kv_tokens` tokens in `sequences` sequences, and of their
    states."""
    return cache_terms(model, setup).bytes(kv_tokens, sequences)


@dataclass(frozen=True)
class ActivationTerms:
    """Bytes of one device that live at the peak of a step: for each of its tokens, and for each row of logits."""

    token_bytes: float
    logits_row_bytes: float

    def bytes(self, step_tokens: float, logits_rows: float) -> float:
        return self.token_bytes * step_tokens + self.logits_row_bytes * logits_rows


def activation_terms(model: ModelSpec, setup: EngineSetup, width: float) -> ActivationTerms:
    """With `width` bytes an activation: the residual and normed hidden states, the widest intermediate; fp32 logits.

    The largest step is one with prompts, whose tokens context parallelism divides; the tokens are those of one rank.
    """
    tp = setup.parallel.tp
    widest = 0
    for group in model.groups():
        mixer, ffn = group.attention, group.ffn
        widest = max([widest, *(2 * n for _, n, _ in mixer.linears(model.hidden, tp))])
        if isinstance(ffn, MoeFfn):
            widest = max(widest, 2 * ffn.top_k * ffn.intermediate // setup.parallel.moe_tp)
        widest = max([widest, *(3 * n // 2 for _, n, _ in ffn.linears(model.hidden, tp))])
    return ActivationTerms((2 * model.hidden + widest) * width / setup.parallel.cp, 4.0 * model.vocab / tp)


@dataclass(frozen=True)
class MemoryTerms:
    """What one device of a deployment holds at any operating point, whose sequences are spread over `ranks`."""

    weights_bytes: float
    cache: CacheTerms
    activations: ActivationTerms
    ranks: int = 1

    def at(self, kv_tokens: float, step_tokens: float, logits_rows: float, sequences: float) -> MemoryBreakdown:
        """With `kv_tokens` tokens of `sequences` sequences cached; `step_tokens` and `logits_rows` in the largest step.

        On the rank with most of the sequences, which are taken to be equally long.
        """
        here = math.ceil(sequences / self.ranks)
        share = here / max(sequences, 1.0)
        cached = float(self.cache.bytes(kv_tokens * share, here))
        activations = self.activations.bytes(step_tokens * share, logits_rows * share)
        return MemoryBreakdown(self.weights_bytes, cached, activations)
