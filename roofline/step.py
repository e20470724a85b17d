"""Which operators does a step run on one device of a deployment?

Sources: Kaplan et al., Scaling Laws, 2020, appendix (FLOPs of a decoder); Ainslie et al., GQA, 2023 (KV bytes);
DeepSeek-V2, 2024, section 2.1 (MLA and its absorbed form); Dao and Gu, Mamba-2, 2024 (state updates); Shoeybi et al.,
Megatron-LM, 2019 (tensor parallelism: two all-reduces a layer).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from membound.roofline.memory import cached_token_bytes, page_bytes
from membound.roofline.mixture import mixture_operators
from membound.roofline.models import LinearShape, ModelSpec
from membound.roofline.models.attention import GroupedQueryAttention, LatentAttention, SparseIndexer
from membound.roofline.models.base import TokenMixer
from membound.roofline.models.ffn import MoeFfn
from membound.roofline.models.layers import LayerGroup
from membound.roofline.operators import (
    NO_PART,
    AttentionHeads,
    Operator,
    elementwise,
    linear,
    message,
)
from membound.roofline.planned import planned_groups
from membound.roofline.precision import PRECISIONS, Precision
from membound.roofline.shape import AttentionPart, Count, StepShape
from membound.roofline.step_context import StepContext
from membound.roofline.techniques import EngineSetup, KvBudget
from membound.roofline.tiles import Tiles


def step_operators(
    model: ModelSpec, setup: EngineSetup, shape: StepShape, activation_bytes: float = 4.0
) -> tuple[Operator, ...]:
    """The operators of one step on one device of the deployment, in order.

    `activation_bytes` is what one activation takes (4 on a CPU, 2 on a GPU). The shape is that of the whole replica:
    data parallelism divides its sequences; context parallelism the new tokens of prompts, of which each device looks at
    all keys, and the cached tokens of those that decode, whose partial outputs are then summed. A pipeline's stages
    follow each other, so that all layers count: the shape is that of one of the micro-batches that are under way
    (`cost.pipelined_cost`).
    """
    return tuple(_Step(model, setup, shape, activation_bytes).operators())


def _part(part: AttentionPart, kv_tokens: Count, attended: Count) -> AttentionPart:
    return part._replace(kv_tokens=kv_tokens, attended=attended)


class _Step(StepContext):
    """Collects the operators of one step."""

    def operators(self) -> list[Operator]:
        model, t, w, tp = self.model, self.tokens, self.width, self.parallel.tp
        made = [
            elementwise("embed", "embed", 1, t * model.hidden, t * model.hidden * (2 + w)),
            elementwise("first_norm", "rms_norm", 1, t * model.hidden, 2 * t * model.hidden * w),
        ]
        made += self._once_beside()
        groups = planned_groups(model, self.plan)
        for index, (group, plan) in enumerate(groups):
            made += self.with_plan(plan)._layers(group, f"{index + 1}." if len(groups) > 1 else "")
        head = model.lm_head
        rows = self.shape.logits_rows
        if np.any(np.asarray(rows) > 0):
            made.append(self.linear("lm_head", 1, rows, -(-head.n // tp), head.k, "lm_head"))
            if tp > 1:
                made.append(message("gather_logits", 1, "allgather", rows * model.vocab * w, tp, in_layers=False))
        if self.parallel.pp > 1:
            pp, of_a_stage = self.parallel.pp, tp * self.parallel.cp * self.parallel.dp
            passed = t * model.hidden * w / tp
            made.append(message("next_stage", pp - 1, "sendrecv", passed, pp, in_layers=False, stride=of_a_stage))
        made.append(Operator("host", "host", 1, sequences=self.shape.sequences, elements=t, logits=rows * model.vocab))
        return made

    def _layers(self, group: LayerGroup, prefix: str) -> list[Operator]:
        model, t, w, tp = self.model, self.tokens, self.width, self.parallel.tp
        count, mixer, ffn = group.count, group.attention, group.ffn
        made: list[Operator] = []
        made += self._mixer(group, prefix)
        if tp > 1 and mixer.kind != "none":
            made += self.after_divided(prefix, "attention", count, _inputs(mixer.linears(model.hidden)))
        norms = model.norms_per_layer if mixer.kind != "none" and ffn.kind != "none" else 1
        moved = 4 * t * model.hidden * w
        made.append(elementwise(f"{prefix}norms", "add_rms_norm", norms * count, t * model.hidden, moved))
        made += self._ffn(group, prefix)
        return made + self._beside(count, prefix)

    def _once_beside(self) -> list[Operator]:
        """What a step passes once of what runs beside mixers and networks."""
        model, t, made = self.model, self.tokens, []
        for beside in model.besides:
            _, columns = beside.table(model.layers)
            if columns:
                moved = t * columns * (2 + self.width)
                made.append(elementwise("embed_layer_inputs", "embed", 1, t * columns, moved))
            for name, n, k in beside.step_linears(model.hidden, model.layers):
                made.append(self.linear(name, 1, t, n, k, "ffn"))
        return made

    def _beside(self, count: int, prefix: str) -> list[Operator]:
        """What so many layers have of it, whole on each device."""
        model, t, made = self.model, self.tokens, []
        for beside in model.besides:
            for name, n, k in beside.layer_linears(model.hidden):
                made.append(self.linear(f"{prefix}{name}", count, t, n, k, "ffn"))
            elements = beside.passes() * t * model.hidden
            name = f"{prefix}add_{beside.name}"
            made.append(elementwise(name, "add_rms_norm", count, elements, 2 * elements * self.width))
        return made

    def _mixer(self, group: LayerGroup, prefix: str) -> list[Operator]:
        return [operator for mixer in group.mixers for operator in self._one_mixer(mixer, group.count, prefix)]

    def _one_mixer(self, mixer: TokenMixer, count: int, prefix: str) -> list[Operator]:
        if isinstance(mixer, GroupedQueryAttention):
            return self._gqa(mixer, count, prefix)
        if isinstance(mixer, LatentAttention):
            return self._mla(mixer, count, prefix)
        if mixer.kind == "none":
            return []
        return self._recurrent(mixer, count, prefix)

    def _gqa(self, a: GroupedQueryAttention, count: int, prefix: str) -> list[Operator]:
        t, w, tp = self.tokens, self.width, self.parallel.tp
        heads, kv_heads = a.heads_on_gpu(tp)
        kv = self.plan.kv_of(sliding=a.window is not None)
        (_, qkv_n, qkv_k), *inner, (_, o_n, o_k) = a.linears(self.model.hidden, tp)
        rotated = t * (heads + (0 if a.shares_kv else 2 * kv_heads)) * a.head_dim
        stored = cached_token_bytes(a, kv, tp) * t
        per_head = AttentionHeads(
            heads,
            kv_heads,
            self._read_bytes(a, kv),
            2.0 * (a.head_dim + a.value_dim),
            a.head_dim + a.value_dim,
            kv,
        )
        return [
            self.linear(f"{prefix}qkv", count, t, qkv_n, qkv_k, "attention"),
            *(self.linear(f"{prefix}{name}", count, t, n, k, "attention") for name, n, k in inner),
            elementwise(f"{prefix}rope_and_store", "rope_and_store", count, rotated, 2 * rotated * w, stored),
            *self._indexing(a.indexer, count, prefix),
            *self._attention(prefix, count, per_head, a),
            *self._choosing(prefix, count, a, per_head),
            self.linear(f"{prefix}o", count, t, o_n, o_k, "attention"),
        ]

    def _read_bytes(self, a: GroupedQueryAttention, kv: Precision) -> Count:
        """Bytes of a token that attention reads for each KV head: on average, where the newest are in 16 bits."""
        each = kv.head_bytes(a.head_dim) + kv.head_bytes(a.value_dim)
        if not kv.window:
            return each
        decode, prefill = self._read(a.reads, self.setup.budget_of("gqa"))
        tokens = np.maximum(decode.kv_tokens + prefill.kv_tokens, 1e-9)
        newest = np.minimum(tokens, self.shape.sequences * kv.window)
        return each + (2.0 * (a.head_dim + a.value_dim) - each) * newest / tokens

    def _seen(self, window: int | None, budget: KvBudget | None) -> tuple[AttentionPart, AttentionPart]:
        """What a layer's attention on this device reads of those who decode and of prompts."""
        return self._on_one(*self._read(window, budget))

    def _read(self, window: int | None, budget: KvBudget | None) -> tuple[AttentionPart, AttentionPart]:
        """What a layer's attention reads of them on all devices of context parallelism."""
        shape = self.shape
        decode, prefill = shape.decode_within(window), shape.prefill_within(window)
        if budget is not None:
            if window is None or window > budget.tokens:
                decode = shape.decode_kept(budget.tokens)
            prefill = prefill.kept(budget.tokens) if budget.evicts else prefill
        return decode, prefill

    def _tiles(self, window: int | None, budget: KvBudget | None = None) -> Tiles | None:
        """Those in which a device computes prompts that are not equal."""
        if not self.shape.tiles or (budget is not None and budget.evicts):
            return None
        cp = self.parallel.cp
        return self.shape.tiles_within(window).mapped(lambda amount: amount / cp)

    def _on_one(self, decode: AttentionPart, prefill: AttentionPart) -> tuple[AttentionPart, AttentionPart]:
        """Of context parallelism: all who decode look at this device's part of the cache, its part of the prompts'
        queries at all keys."""
        cp = self.parallel.cp
        if cp == 1:
            return decode, prefill
        return (
            decode._replace(kv_tokens=decode.kv_tokens / cp, attended=decode.attended / cp),
            prefill._replace(tokens=prefill.tokens / cp, attended=prefill.attended / cp),
        )

    def _choosing(self, prefix: str, count: int, a: GroupedQueryAttention, heads: AttentionHeads) -> list[Operator]:
        """What it costs to know which tokens to keep or to read: a pass over keys, or over the bounds of pages."""
        budget = self.setup.budget_of(a.kind)
        if budget is None or budget.policy == "streaming":
            return []
        decode, prefill = self._seen(a.window, budget)
        keys = replace(heads, kv_bytes_per_token=heads.kv.head_bytes(a.head_dim), flops_per_pair=2.0 * a.head_dim)
        keys = replace(keys, qk_and_v_dims=a.head_dim)
        if budget.policy == "quest":
            pages, _ = self._on_one(self.shape.decode_part, NO_PART)
            bounds = page_bytes(a, self.parallel.tp) / heads.kv_heads
            keys = replace(keys, kv_bytes_per_token=bounds, flops_per_pair=4.0 * a.head_dim)
            if not np.any(np.asarray(pages.sequences) > 0):
                return []
            known, pairs = pages.kv_tokens / budget.page, pages.attended / budget.page
            return [self._one_attention(f"{prefix}pages", count, keys, _part(pages, known, pairs), NO_PART)]
        if budget.scoring is not None:  # the last queries of a prompt look at all of it once more
            share = np.minimum(1.0, budget.scoring * prefill.sequences / np.maximum(prefill.tokens, 1e-9))
            prefill = prefill._replace(tokens=prefill.tokens * share, attended=prefill.attended * share)
            decode = NO_PART
            if not np.any(np.asarray(prefill.sequences) > 0):
                return []
        return [self._one_attention(f"{prefix}scores_again", count, keys, decode, prefill)]

    def _attention(self, prefix: str, count: int, heads: AttentionHeads, a: GroupedQueryAttention) -> list[Operator]:
        """Attention over the cache; where it is not fused, the scores are written, read, and written again."""
        decode, prefill = self._seen(a.reads, self.setup.budget_of("gqa"))
        tiles = self._tiles(a.reads, self.setup.budget_of("gqa"))
        made = [self._one_attention(f"{prefix}attention", count, heads, decode, prefill, tiles)]
        if not self.setup.fused_attention:
            scores = heads.heads * (decode.attended + prefill.attended)
            made.append(elementwise(f"{prefix}scores", "scores", count, scores, 4.0 * scores * self.width))
        keys = prefill.kv_tokens * heads.kv_bytes_per_token * heads.kv_heads
        return made + self._context_messages(prefix, count, decode.tokens * heads.heads, a.value_dim, keys)

    def _context_messages(self, prefix: str, count: int, outputs: Count, dims: int, keys: Count) -> list[Operator]:
        """The messages of context parallelism about a layer's attention.

        Of those who decode `outputs` vectors of `dims` elements, each with the fp32 logarithm of its sum, are summed;
        of prompts `keys` bytes are gathered before it (Llama 3, 2024, section 3.3.2, from memory).
        """
        cp, tp, made = self.parallel.cp, self.parallel.tp, []
        if cp > 1 and np.any(np.asarray(outputs) > 0):
            partial = outputs * (dims * self.width + 4.0)
            made.append(message(f"{prefix}reduce_context", count, "allreduce", partial, cp, stride=tp))
        if cp > 1 and np.any(np.asarray(keys) > 0):
            made.append(message(f"{prefix}gather_keys", count, "allgather", keys, cp, stride=tp))
        return made

    def _mla(self, a: LatentAttention, count: int, prefix: str) -> list[Operator]:
        """Decode on the latents with the up-projection absorbed; prefill with K and V of every head unpacked."""
        shape, tp, w = self.shape, self.parallel.tp, self.width
        heads = a.heads_on_gpu(tp)
        kv = self.plan.kv
        latent = a.kv_elements_per_token
        decode, prefill = shape.decode_part, shape.prefill_part
        unabsorbed = decode if not self.setup.absorbed_mla else NO_PART
        made = []
        for name, n, k in a.linears(self.model.hidden, tp):
            if name == "kv_b":
                # Latents are gathered, which are far smaller than K and V, so that each device of cp unpacks all.
                rows = prefill.kv_tokens + unabsorbed.kv_tokens / self.parallel.cp
                if np.any(np.asarray(rows) > 0):
                    made.append(self.linear(f"{prefix}kv_b", count, rows, n, k, "attention"))
            elif name != "o":
                made.append(self.linear(f"{prefix}{name}", count, self.tokens, n, k, "attention"))
        rotated = self.tokens * (heads * a.qk_rope_head_dim + latent)
        stored = kv.head_bytes(latent) * self.tokens
        made.append(elementwise(f"{prefix}rope_and_store", "rope_and_store", count, rotated, 2 * rotated * w, stored))
        if self.setup.absorbed_mla and np.any(np.asarray(decode.tokens) > 0):
            # Engines unpack the two halves once at load, so that they stay in 16 bits whatever the weights have.
            plain = self.plan.plain
            for name, n, k in a.absorbed_linears():
                made.append(linear(f"{prefix}{name}", count, decode.tokens, heads * n, k, plain, self.width, plain))
        made += self._indexing(a.indexer, count, prefix)
        made += self._mla_attention(a, count, prefix, heads)
        (output,) = (shape for shape in a.linears(self.model.hidden, tp) if shape.name == "o")
        made.append(self.linear(f"{prefix}o", count, self.tokens, output.n, output.k, "attention"))
        return made

    def _indexing(self, indexer: SparseIndexer | None, count: int, prefix: str) -> list[Operator]:
        """The pass of sparse attention's light heads over the keys of all tokens, whole on each device of tp.

        A query's scores are summed over the heads, and no values are read (DeepSeek-V3.2, 2025, its lightning indexer).
        """
        if indexer is None or indexer.shared:
            return []
        dim, keys = indexer.head_dim, float(indexer.key_bytes_per_token)
        heads = AttentionHeads(
            indexer.heads, 1, keys, 2.0 * dim, dim, PRECISIONS[indexer.key_format], latents=True, scores_only=True
        )
        name = f"{prefix}index"
        decode, prefill = self._on_one(self.shape.decode_part, self.shape.prefill_part)
        return [self._one_attention(name, count, heads, decode, prefill, self._tiles(None))]

    def _mla_attention(self, a: LatentAttention, count: int, prefix: str, heads: int) -> list[Operator]:
        shape, kv = self.shape, self.plan.kv
        dims = a.qk_head_dim + a.v_head_dim
        chosen = a.indexer.top_k if a.indexer is not None else None
        decode, prefill = self._on_one(shape.decode_within(chosen), shape.prefill_within(chosen))
        latent = kv.head_bytes(a.kv_elements_per_token)
        index_key = a.indexer.key_bytes_per_token if a.indexer is not None else 0
        made = []
        if np.any(np.asarray(prefill.tokens) > 0) or not self.setup.absorbed_mla:
            unpacked = AttentionHeads(heads, heads, 2.0 * dims, 2.0 * dims, dims, PRECISIONS["bf16"])
            part = decode if not self.setup.absorbed_mla else NO_PART
            name = f"{prefix}attention_unpacked"
            made.append(self._one_attention(name, count, unpacked, part, prefill, self._tiles(chosen)))
        if self.setup.absorbed_mla and np.any(np.asarray(decode.tokens) > 0):
            flops = 2.0 * (2 * a.kv_lora_rank + a.qk_rope_head_dim)
            dims = a.kv_elements_per_token + a.kv_lora_rank
            absorbed = AttentionHeads(heads, 1, latent, flops, dims, kv, latents=True)
            made.append(self._one_attention(f"{prefix}attention", count, absorbed, decode, NO_PART))
        outputs = a.kv_lora_rank if self.setup.absorbed_mla else a.v_head_dim
        keys = shape.prefill_part.kv_tokens * (latent + index_key)
        return made + self._context_messages(prefix, count, decode.tokens * heads, outputs, keys)

    def _one_attention(
        self,
        name: str,
        count: int,
        heads: AttentionHeads,
        decode: AttentionPart,
        prefill: AttentionPart,
        tiles: Tiles | None = None,
    ) -> Operator:
        tokens = decode.tokens + prefill.tokens
        return Operator(
            name,
            "attention",
            count,
            flops=heads.flops_per_pair * heads.heads * (decode.attended + prefill.attended),
            kv_bytes=heads.kv_bytes_per_token * heads.kv_heads * (decode.kv_tokens + prefill.kv_tokens),
            activation_bytes=tokens * heads.heads * heads.qk_and_v_dims * self.width,
            sequences=decode.sequences + prefill.sequences,
            heads=heads,
            decode=decode,
            prefill=prefill,
            tiles=tiles,
        )

    def _recurrent(self, mixer: TokenMixer, count: int, prefix: str) -> list[Operator]:
        """Linears, then one update of the state a token: 5 FLOPs and, for each sequence, a read and a write of it.

        A state has no tokens to divide: each device of context parallelism has all of it, and of a prompt they gather
        what each one's tokens make of it.
        """
        t, tp = self.tokens, self.parallel.tp
        state = mixer.state_elements_on_gpu(tp)
        made = [
            self.linear(f"{prefix}{name}", count, t, n, k, "attention")
            for name, n, k in mixer.linears(self.model.hidden, tp)
        ]
        state_bytes = state * mixer.state_bits / 8 + 2.0 * mixer.conv_elements / tp
        share = state / mixer.state_elements if mixer.state_elements else 1.0 / tp
        made.append(
            Operator(
                f"{prefix}state",
                "recurrent",
                count,
                flops=5.0 * state * t,
                kv_bytes=2.0 * state_bytes * self.shape.sequences,
                activation_bytes=4.0 * t * share * self.model.hidden * self.width,
                elements=t,
                sequences=self.shape.sequences,
                mixer=mixer.kind,
            )
        )
        cp, prompts = self.parallel.cp, self.shape.prefill_sequences
        if cp > 1 and np.any(np.asarray(prompts) > 0):
            states = cp * state_bytes * prompts
            made.append(message(f"{prefix}gather_states", count, "allgather", states, cp, stride=tp))
        return made

    def _ffn(self, group: LayerGroup, prefix: str) -> list[Operator]:
        model, t, tp = self.model, self.tokens, self.parallel.tp
        count, ffn = group.count, group.ffn
        if ffn.kind == "none":
            return []
        if isinstance(ffn, MoeFfn):
            return mixture_operators(self, ffn, count, prefix)
        made = []
        for name, n, k in ffn.linears(model.hidden, tp):
            made.append(self.linear(f"{prefix}{name}", count, t, n, k, "ffn"))
            if name in ("gate_up", "up"):
                made.append(self.activation(f"{prefix}silu_mul", count, t, n, gated=name == "gate_up"))
        if tp > 1:
            made += self.after_divided(prefix, "ffn", count, _inputs(ffn.linears(model.hidden)))
        return made


def _inputs(linears: tuple[LinearShape, ...]) -> int:
    """Inputs of the matrices that give a layer's output."""
    return sum(k for name, _, k in linears if name in ("o", "out_proj", "down"))


def step_weight_bytes(model: ModelSpec, setup: EngineSetup) -> float:
    """Bytes of weights that a decode step of one sequence reads on one device: every linear, the experts of one token,
    the lm_head; of the embedding only single rows."""
    operators = step_operators(model, setup, StepShape.decode(1.0, 1.0))
    return sum(float(op.weight_bytes) * op.calls for op in operators)
