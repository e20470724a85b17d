"""What does a decoder layer cost on a GPU when every operation is one pass over its bytes?

The Triton kernels under the runtime's interface, chosen by the shape of a step. Nothing in here waits for the GPU, so a
step of it can be captured as a CUDA graph. Matrix products with fp32 weights, and with bf16 ones but for a few tokens
and narrow matrices, are the vendor's (cuBLAS): they read each weight once too, and nothing is left to fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
from torch import Tensor
from torch.nn import functional

from membound.kernels.attention_received import attention_received
from membound.kernels.base import BlockCopier, Mamba2Vectors, PackedWeight, RaggedBatch, WeightFormat, chain_of
from membound.kernels.composed import ComposedKernels
from membound.kernels.kivi import KiviBlocks
from membound.kernels.kv_formats import QuantizedKv
from membound.kernels.quantize import dequantize, rounded_inputs
from membound.kernels.recurrent import seats_of
from membound.kernels.reference import TorchKernels
from membound.kernels.routing import GroupedLinear, Routing, RoutingRule
from membound.kernels.triton.block_copy import TritonCopier
from membound.kernels.triton.decode_attention import decode_attention
from membound.kernels.triton.head_norm import head_norm
from membound.kernels.triton.kivi_attention import kivi_attention
from membound.kernels.triton.kivi_round import kivi_round
from membound.kernels.triton.kv_blocks import KvBlocks
from membound.kernels.triton.latent_store import latent_store
from membound.kernels.triton.launch import compiled
from membound.kernels.triton.linear_byte import ByteWeight, linear_byte
from membound.kernels.triton.linear_half import linear_half, takes
from membound.kernels.triton.linear_int4 import Int4Weight, linear_int4
from membound.kernels.triton.linear_int8 import Int8Weight, linear_int8
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight, linear_mxfp4
from membound.kernels.triton.linear_sparse import SparseWeight, linear_sparse
from membound.kernels.triton.linear_w4a8 import linear_w4a8, step_of
from membound.kernels.triton.linear_w8a8 import BLOCK as FP8_BLOCK
from membound.kernels.triton.linear_w8a8 import Fp8Blocks, linear_fp8_blocks, linear_w8a8
from membound.kernels.triton.machine import INTERPRETED, machine_of
from membound.kernels.triton.mamba1_update import mamba1_update
from membound.kernels.triton.mamba2_update import mamba2_update
from membound.kernels.triton.mla_decode import latents_fit, mla_decode
from membound.kernels.triton.mla_prefill import mla_prefill
from membound.kernels.triton.moe_linear import moe_combine
from membound.kernels.triton.moe_routing import MOST_EXPERTS, count_routed, route
from membound.kernels.triton.overlapping import overlapping
from membound.kernels.triton.packing import TritonExperts, TritonFp8, TritonPacker, TritonWeight, expert_format, kind_of
from membound.kernels.triton.prefill_attention import prefill_attention
from membound.kernels.triton.rms_norm import rms_norm
from membound.kernels.triton.rope_store import rope_store
from membound.kernels.triton.round_rows import round_blocks, round_rows, round_step, round_steps
from membound.kernels.triton.rwkv_update import rwkv6_update, rwkv7_update
from membound.kernels.triton.short_conv import short_conv
from membound.kernels.triton.silu_mul import silu_mul
from membound.kernels.triton.steps import Steps
from membound.kernels.triton.verify_attention import LARGEST_TREE, verify_attention
from membound.kernels.triton.verify_sampling import verify_sampling


class TritonKernels(ComposedKernels):
    """bf16 activations, K and V in bf16 or quantized; all weight formats.

    Weights in a byte are read as they are packed where a row has one scale, int8 also in INT8_GROUPS, fp8 where a block
    has one, int4 in GROUPS of which zero is a code, and 2:4; the others are widened in each call, as `emulates` says.
    Rows of a batch whose `context_len` is 0 and whose slots are negative are padding: they store nothing and attend
    to nothing. On device "cpu" it runs where Triton was imported with TRITON_INTERPRET=1.
    """

    name = "triton"
    activation_dtype = torch.bfloat16
    kv_dtype = torch.bfloat16
    emulates_quantized_kv = False
    emulates_kivi = False
    keeps_mxfp4 = True
    interleaved = False

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self._torch = TorchKernels(device)
        self.chain_verifier = verify_sampling
        self._packer = TritonPacker()
        self._chains: tuple[RaggedBatch, Tensor] | None = None

    def stalls(self) -> int:
        return 0

    def compilations(self) -> int:
        return compiled()

    def describe(self) -> str:
        if INTERPRETED:
            return f"Triton {triton.__version__}, interpreted on the CPU"
        machine = machine_of(self.device)
        return (
            f"Triton {triton.__version__} for {machine.arch} on {torch.cuda.get_device_name(self.device)}, "
            f"{machine.multiprocessors} multiprocessors; bf16 linears of many tokens by the vendor's library; "
            f"launches {'overlap' if overlapping(machine, self.device, recorded=False) else 'follow one another'}"
        )

    def pack(self, weight: Tensor, format: WeightFormat, group_size: int | None = None) -> PackedWeight:
        return self._packer.pack(weight, format, group_size)

    def pack_codes(self, codes: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat) -> PackedWeight:
        return self._packer.pack_codes(codes, scale, zero, format)

    def pack_fp8(
        self, codes: Tensor, scale: Tensor, *, rounds_inputs: bool, whole_step: bool = False
    ) -> PackedWeight | None:
        if plain := super().pack_fp8(codes, scale, rounds_inputs=rounds_inputs):
            return plain
        if whole_step and scale.dim() == 2:
            return None
        bytes_ = codes.view(torch.uint8)
        return TritonFp8("fp8", bytes_, scale, rounds_inputs=rounds_inputs, whole_step=whole_step)

    def pack_gguf(self, raw: Tensor, type: str, shape: tuple[int, int]) -> PackedWeight:
        return self._packer.pack_gguf(raw, type, shape)

    def emulates(self, weight: PackedWeight) -> bool:
        read = isinstance(weight, TritonWeight | TritonFp8) or _is_rows_of_bytes(weight)
        return not read and weight.format not in ("fp32", "bf16")

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        if isinstance(weight, TritonWeight):
            if weight.kept is not None:
                return linear_sparse(x, SparseWeight(weight.data, weight.kept, weight.shape[1]))
            assert weight.scale is not None
            if weight.format == "mxfp4":
                return linear_mxfp4(x, Mxfp4Weight(weight.data, weight.scale, weight.shape[0]))
            if weight.format == "int8":
                return linear_int8(x, Int8Weight(weight.data, weight.scale))
            int4 = Int4Weight(weight.data, weight.scale, weight.offset)
            if weight.format == "w4a8":
                return linear_w4a8(round_steps(x, step_of(int4.group)), int4, self.activation_dtype)
            return linear_int4(x, int4)
        if isinstance(weight, TritonFp8):
            return self._linear_fp8(x, weight)
        if _is_rows_of_bytes(weight):
            assert weight.scale is not None
            rows = ByteWeight("fp8" if weight.format == "fp8" else "int8", weight.data, weight.scale)
            if weight.format == "w8a8":
                return linear_w8a8(round_rows(x, "int8"), rows, self.activation_dtype)
            return linear_byte(x, rows)
        if weight.format == "w4a8":
            x = rounded_inputs(x, weight)
        if weight.format not in ("fp32", "bf16"):
            return functional.linear(x, dequantize(weight).to(x.dtype)).to(self.activation_dtype)
        if takes(x, weight.data):
            return linear_half(x, weight.data)
        return functional.linear(x.to(weight.data.dtype), weight.data).to(self.activation_dtype)

    def _linear_fp8(self, x: Tensor, weight: TritonFp8) -> Tensor:
        assert weight.scale is not None
        if weight.scale.dim() == 2:
            blocks = Fp8Blocks(weight.data, weight.scale, FP8_BLOCK)
            return linear_fp8_blocks(round_blocks(x) if weight.rounds_inputs else x, blocks, self.activation_dtype)
        rows = ByteWeight("fp8", weight.data, weight.scale)
        rounded = round_step(x, "fp8") if weight.whole_step else round_rows(x, "fp8")
        return linear_w8a8(rounded, rows, self.activation_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, residual=residual)

    def norm_heads(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        head_norm(x, first, heads, weight.view(-1, weight.shape[-1]), eps)

    def rope_and_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, k_blocks: Tensor, v_blocks: Tensor
    ) -> Tensor:
        return rope_store(qkv, cos, sin, batch.positions, batch.slots, KvBlocks("bf16", k_blocks, v_blocks))

    def rope_and_store_quantized(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: QuantizedKv
    ) -> Tensor:
        return rope_store(qkv, cos, sin, batch.positions, batch.slots, KvBlocks(kv.format, kv.k, kv.v, kv.scales))

    def attention(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, KvBlocks("bf16", k_blocks, v_blocks), batch, scale, window, softcap)

    def attention_with_sinks(
        self,
        q: Tensor,
        k_blocks: Tensor,
        v_blocks: Tensor,
        batch: RaggedBatch,
        scale: float,
        sinks: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, KvBlocks("bf16", k_blocks, v_blocks), batch, scale, window, softcap, sinks)

    def attention_quantized(
        self,
        q: Tensor,
        kv: QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return self._attend(q, KvBlocks(kv.format, kv.k, kv.v, kv.scales), batch, scale, window, softcap)

    def attention_scores(
        self,
        q: Tensor,
        keys: Tensor | QuantizedKv,
        batch: RaggedBatch,
        scale: float,
        *,
        queries: int,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if isinstance(keys, QuantizedKv) or batch.tree is not None:
            return self._torch.attention_scores(q, keys, batch, scale, queries=queries, window=window, softcap=softcap)
        most = batch.queries_at_most
        return attention_received(q, keys, batch, scale, queries=queries, most=most, window=window, softcap=softcap)

    def latent_rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        blocks: Tensor,
    ) -> Tensor:
        latent_store(q, latents, norm, eps, cos, sin, batch.positions, batch.slots, blocks.squeeze(2))
        return q

    def latent_attention(self, q: Tensor, blocks: Tensor, batch: RaggedBatch, scale: float, rank: int) -> Tensor:
        most = batch.queries_at_most
        if most > LARGEST_TREE or not latents_fit(rank, q.shape[2] - rank):
            return self._torch.latent_attention(q, blocks, batch, scale, rank)
        where = q, blocks.squeeze(2), batch.block_table, batch.context_len, scale
        if most == 1:
            return mla_decode(*where, rank=rank)
        tree = self._chain(batch) if batch.tree is None else batch.tree
        return mla_decode(*where, rank=rank, tree=tree, query_start=batch.query_start, most_queries=most)

    def unpacked_attention(
        self, q: Tensor, unpacked: Tensor, keys: Tensor, new: Sequence[int], contexts: Sequence[int], scale: float
    ) -> Tensor:
        starts = torch.tensor([[0, *accumulate(new)], [0, *accumulate(contexts)]], dtype=torch.int32).to(q.device)
        return mla_prefill(q, unpacked, keys, starts[0], starts[1], scale)

    def block_copier(self, pools: Sequence[Tensor]) -> BlockCopier:
        return TritonCopier(super().block_copier, pools)

    def kivi_make_room(self, kv: KiviBlocks, batch: RaggedBatch) -> None:
        kivi_round(kv, batch)

    def attention_kivi(
        self,
        q: Tensor,
        kv: KiviBlocks,
        batch: RaggedBatch,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None or (window is not None and batch.queries_at_most > 1):
            return super().attention_kivi(q, kv, batch, scale, window=window, softcap=softcap)
        return kivi_attention(q, kv, batch, scale, window=window).flatten(1)

    def grouped(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None = None) -> GroupedLinear | None:
        format = expert_format(weights[0])
        alike = all(kind_of(weight) == kind_of(weights[0]) for weight in weights)
        if format is None or not alike or len(weights) > MOST_EXPERTS:
            return None
        return TritonExperts.of(weights, biases, format)

    def route(
        self, logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None = None, slots: Tensor | None = None
    ) -> Routing:
        return route(
            logits,
            top_k,
            scoring=rule.scores,
            renormalize=rule.normalized,
            bias=bias,
            biased=rule.bias,
            scale=rule.scale,
            groups=rule.groups,
            group_top_k=rule.group_top_k,
            group_score=rule.group_score,
            probabilities=True,
            slots=slots,
        )

    def count_routed(self, chosen: Routing, tokens: Tensor, load: Tensor, probability: Tensor) -> None:
        count_routed(chosen, tokens, load, probability)

    def combine(self, slots: Tensor, chosen: Routing) -> Tensor:
        return moe_combine(slots, chosen)

    def causal_convolution(
        self, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, batch: RaggedBatch
    ) -> Tensor:
        return short_conv(x, state, seats_of(batch), weight, bias, steps=_steps(batch))

    def mamba2_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        vectors: Mamba2Vectors,
        batch: RaggedBatch,
    ) -> Tensor:
        v, seats = vectors, seats_of(batch)
        return mamba2_update(state, seats, x, dt, v.dt_bias, v.a, b, c, v.d, z, steps=_steps(batch))

    def mamba1_scan(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        z: Tensor,
        a: Tensor,
        d: Tensor,
        batch: RaggedBatch,
    ) -> Tensor:
        return mamba1_update(state, seats_of(batch), x, dt, b, c, z, a, d, steps=_steps(batch))

    def rwkv6_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return rwkv6_update(state, seats_of(batch), r, w, k, v, u, steps=_steps(batch))

    def delta_scan(
        self, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, batch: RaggedBatch
    ) -> Tensor:
        return rwkv7_update(state, seats_of(batch), r, w, k, v, a, b, steps=_steps(batch))

    def _attend(
        self,
        q: Tensor,
        kv: KvBlocks,
        batch: RaggedBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """By the most tokens that a sequence brings: one is decode; a few share a split context, as drafts do."""
        most = batch.queries_at_most
        if most == 1:
            where = q, kv, batch.block_table, batch.context_len, scale
            return decode_attention(*where, window=window, softcap=softcap, sinks=sinks).flatten(1)
        ragged = kv, batch.block_table, batch.query_start, batch.context_len, scale
        if batch.tree is not None or most <= LARGEST_TREE:
            tree = self._chain(batch) if batch.tree is None else batch.tree
            out = verify_attention(q, tree, *ragged, most_queries=most, window=window, softcap=softcap, sinks=sinks)
        else:
            out = prefill_attention(q, *ragged, window=window, softcap=softcap, sinks=sinks)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def _chain(self, batch: RaggedBatch) -> Tensor:
        """The tree [tokens] of drafts that follow one another, made once for all layers of a step."""
        if self._chains is None or self._chains[0] is not batch:
            self._chains = batch, chain_of(batch.query_start, batch.num_tokens)
        return self._chains[1]


def _is_rows_of_bytes(weight: PackedWeight) -> bool:
    """Whether a weight is int8 or e4m3 with a scale a row."""
    return weight.format in ("int8", "fp8", "w8a8") and weight.group_size is None and weight.scale is not None


def _steps(batch: RaggedBatch) -> Steps:
    return Steps(batch.query_start, batch.positions)
