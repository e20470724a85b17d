"""With which shapes does serving launch each kernel? What is compiled without a GPU and timed with one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.kivi import KiviBlocks
from membound.kernels.triton.activation import ActivationFormat, QuantizedRows
from membound.kernels.triton.block_copy import BlockPools
from membound.kernels.triton.decode_attention import decode_attention
from membound.kernels.triton.kivi_attention import kivi_attention
from membound.kernels.triton.kivi_round import kivi_round
from membound.kernels.triton.kv_blocks import KvBlocks, KvFormat
from membound.kernels.triton.latent_store import latent_store
from membound.kernels.triton.launch import Launch, recording
from membound.kernels.triton.linear_byte import ByteFormat, ByteWeight, linear_byte
from membound.kernels.triton.linear_int4 import PACK_ROWS, Int4Weight, linear_int4
from membound.kernels.triton.linear_int8 import PACK_ROWS as INT8_ROWS
from membound.kernels.triton.linear_int8 import WORD, Int8Weight, linear_int8
from membound.kernels.triton.linear_mxfp4 import Mxfp4Weight, linear_mxfp4
from membound.kernels.triton.linear_sparse import HALF_CHUNK, SparseWeight, linear_sparse
from membound.kernels.triton.linear_w4a8 import linear_w4a8, step_of
from membound.kernels.triton.linear_w8a8 import Fp8Blocks, linear_fp8_blocks, linear_w8a8
from membound.kernels.triton.machine import Machine
from membound.kernels.triton.mamba1_update import mamba1_update
from membound.kernels.triton.mamba2_update import mamba2_update
from membound.kernels.triton.mla_decode import mla_decode
from membound.kernels.triton.mla_prefill import mla_prefill
from membound.kernels.triton.moe_experts import ExpertFormat, ExpertWeights
from membound.kernels.triton.moe_linear import moe_combine, moe_linear
from membound.kernels.triton.moe_routing import route
from membound.kernels.triton.prefill_attention import prefill_attention
from membound.kernels.triton.rms_norm import rms_norm
from membound.kernels.triton.rope_store import kv_store, rope_store
from membound.kernels.triton.round_rows import QuantizedSteps, round_blocks, round_rows, round_step, round_steps
from membound.kernels.triton.rwkv_update import rwkv6_update, rwkv7_update
from membound.kernels.triton.short_conv import short_conv
from membound.kernels.triton.silu_mul import silu_mul
from membound.kernels.triton.steps import Steps
from membound.kernels.triton.verify_attention import verify_attention
from membound.kernels.triton.verify_sampling import verify_sampling

META = torch.device("meta")
SEQUENCES, BLOCK_SIZE, BLOCKS_A_SEQUENCE = 16, 16, 512


def _of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _floats(*shape: int) -> Tensor:
    return _of(*shape, dtype=torch.float32)


def _ints(*shape: int) -> Tensor:
    return _of(*shape, dtype=torch.int32)


def _decode(format: KvFormat, heads: int, kv_heads: int, head_dim: int) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q = _of(SEQUENCES, heads, head_dim)
    decode_attention(q, kv, _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES), head_dim**-0.5)


def _sunk(tokens: int) -> None:
    """gpt-oss-20b: 64 query heads with a sink each, 8 KV heads of 64; every other layer has a window."""
    kv, sinks = KvBlocks.zeros("bf16", 8192, BLOCK_SIZE, 8, 64, META), _of(64, dtype=torch.float32)
    q, table, lengths = _of(tokens, 64, 64), _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES)
    if tokens == SEQUENCES:
        decode_attention(q, kv, table, lengths, 0.125, sinks=sinks)
    else:
        prefill_attention(q, kv, table, _ints(SEQUENCES + 1), lengths, 0.125, window=128, sinks=sinks)


def _capped(heads: int, kv_heads: int, head_dim: int) -> None:
    """Gemma-2-9B caps its scores at 50."""
    kv = KvBlocks.zeros("bf16", 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q = _of(SEQUENCES, heads, head_dim)
    where = kv, _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES), 0.0625
    decode_attention(q, *where, softcap=50.0)


def _prefill(format: KvFormat, heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q, table, starts = _of(8192, heads, head_dim), _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES + 1)
    prefill_attention(q, kv, table, starts, _ints(SEQUENCES), head_dim**-0.5, window=window)


def _verify(format: KvFormat, drafts: int, window: int | None = None) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, 8, 128, META)
    tokens = SEQUENCES * (drafts + 1)
    q, tree, table = _of(tokens, 32, 128), _of(tokens, dtype=torch.int64), _ints(SEQUENCES, BLOCKS_A_SEQUENCE)
    starts, lengths = _ints(SEQUENCES + 1), _ints(SEQUENCES)
    verify_attention(q, tree, kv, table, starts, lengths, 128**-0.5, most_queries=drafts + 1, window=window)


def _kivi(bits: int, drafts: int = 0) -> tuple[KiviBlocks, RaggedBatch]:
    kv = KiviBlocks.zeros(bits, 32, 128, 8192, BLOCK_SIZE, 8, 128, 64, META)
    tokens = SEQUENCES * (drafts + 1)
    places, seats = _of(tokens, dtype=torch.int64), _of(SEQUENCES, dtype=torch.int64)
    table = _ints(SEQUENCES, BLOCKS_A_SEQUENCE)
    batch = RaggedBatch(places, places, _ints(SEQUENCES + 1), _ints(SEQUENCES), table, drafts + 1, seats)
    return kv, batch


def _kivi_attention(bits: int, drafts: int = 0) -> None:
    kv, batch = _kivi(bits, drafts)
    kivi_attention(_of(batch.num_tokens, 32, 128), kv, batch, 128**-0.5)


def _linear_int4(m: int, *, zero: bool) -> None:
    n, k, group = 4096, 14336, 128
    data = _of(n // PACK_ROWS, k // group, PACK_ROWS, group // 2, dtype=torch.uint8)
    zeros = _of(k // group // 8, n, 4, dtype=torch.uint8) if zero else None
    linear_int4(_of(m, k), Int4Weight(data, _of(k // group // 2, n, 2), zeros))


def _linear_w4a8(m: int, *, zero: bool = False, group: int = 128) -> None:
    n, k, step = 4096, 14336, step_of(group)
    data = _of(n // PACK_ROWS, k // group, PACK_ROWS, group // 2, dtype=torch.uint8)
    zeros = _of(-(-k // group // 8), n, 4, dtype=torch.uint8) if zero else None
    x = QuantizedSteps(_of(m, k, dtype=torch.int8), _of(m, k // step, dtype=torch.float32), step)
    weight = Int4Weight(data, _of(k // group // 2, n, 2, dtype=torch.float16), zeros)
    linear_w4a8(x, weight, torch.bfloat16)


def _linear_int8(m: int, group: int) -> None:
    n, k = 4096, 14336
    data = _of(n // INT8_ROWS, k // group, INT8_ROWS, group, dtype=torch.int8)
    linear_int8(_of(m, k), Int8Weight(data, _of(-(-k // group // WORD), n, WORD, dtype=torch.float16)))


def _linear_byte(format: ByteFormat, m: int) -> None:
    n, k = 4096, 14336
    data = _of(n, k, dtype=torch.int8 if format == "int8" else torch.uint8)
    linear_byte(_of(m, k), ByteWeight(format, data, _of(n, dtype=torch.float32)))


def _linear_w8a8(format: ByteFormat, m: int, *, whole_step: bool = False) -> None:
    n, k = 4096, 14336
    data = _of(n, k, dtype=torch.int8 if format == "int8" else torch.uint8)
    x = QuantizedRows.empty(format, m, k, META)
    x = QuantizedRows(format, x.data, _of(1, dtype=torch.float32)) if whole_step else x
    linear_w8a8(x, ByteWeight(format, data, _of(n, dtype=torch.float32)), torch.bfloat16)


def _linear_fp8_blocks(m: int, *, rounded: bool = True) -> None:
    n, k = 4096, 14336
    x = Fp8Blocks(_of(m, k, dtype=torch.uint8), _of(m, k // 128, dtype=torch.float32), 1)
    weight = Fp8Blocks(_of(n, k, dtype=torch.uint8), _of(n // 128, k // 128, dtype=torch.float32), 128)
    linear_fp8_blocks(x if rounded else _of(m, k), weight, torch.bfloat16)


def _linear_sparse(m: int) -> None:
    n, k = 4096, 14336
    values, places = _of(n, k // 256, 2, 2, HALF_CHUNK), _of(n, k // 256, HALF_CHUNK, dtype=torch.uint8)
    linear_sparse(_of(m, k), SparseWeight(values, places, k))


def _linear_mxfp4(m: int) -> None:
    n, k = 4096, 14336
    tiles = n // PACK_ROWS
    data = _of(tiles, k // 32, PACK_ROWS, 16, dtype=torch.uint8)
    scale = _of(tiles, k // 128, PACK_ROWS, 4, dtype=torch.uint8)
    linear_mxfp4(_of(m, k), Mxfp4Weight(data, scale, n))


def _route_in_groups() -> None:
    """DeepSeek-V3: 8 of 256 experts, of the 4 best of 8 groups."""
    logits, bias = _of(SEQUENCES, 256), _of(256, dtype=torch.float32)
    rule = partial(route, scoring="sigmoid", groups=8, group_top_k=4, group_score="best_two", probabilities=True)
    rule(logits, 8, bias=bias)


def _moe(format: ExpertFormat, tokens: int) -> None:
    """8 of 128 experts of width 768 and hidden 2048, as in Qwen3-30B-A3B."""
    experts, top_k, n, k = 128, 8, 1536, 2048
    routing, multiplied = route(_of(tokens, experts), top_k), partial(moe_linear, shared_rows=True)
    if format == "mxfp4":
        packed = _of(experts, n // PACK_ROWS, k // 32, PACK_ROWS, 16, dtype=torch.uint8)
        exponents = _of(experts, n // PACK_ROWS, k // 128, PACK_ROWS, 4, dtype=torch.uint8)
        multiplied(_of(tokens, k), ExpertWeights(format, packed, exponents, rows=n), routing)
        return
    if format == "int4":
        packed = _of(experts, n // PACK_ROWS, k // 128, PACK_ROWS, 64, dtype=torch.uint8)
        multiplied(_of(tokens, k), ExpertWeights(format, packed, _of(experts, k // 256, n, 2), rows=n), routing)
        return
    if format == "fp8_blocks":
        blocks = ExpertWeights(format, _of(experts, n, k, dtype=torch.uint8), _floats(experts, n // 128, k // 128))
        multiplied(Fp8Blocks(_of(tokens, k, dtype=torch.uint8), _floats(tokens, k // 128), 1), blocks, routing,
                   dtype=torch.bfloat16)  # fmt: skip
        multiplied(_of(tokens, k), blocks, routing)
        return
    data = _of(experts, n, k, dtype={"half": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}[format])
    scale = None if format == "half" else _of(experts, n, dtype=torch.float32)
    slots = multiplied(_of(tokens, k), ExpertWeights(format, data, scale), routing)
    moe_combine(slots, routing)


def _mla(heads: int) -> None:
    q, cache = _of(SEQUENCES, heads, 576), _of(8192, BLOCK_SIZE, 576)
    mla_decode(q, cache, _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES), 192**-0.5, rank=512)


def _mla_drafts(heads: int, drafts: int) -> None:
    tokens = SEQUENCES * (drafts + 1)
    q, cache, tree = _of(tokens, heads, 576), _of(8192, BLOCK_SIZE, 576), _of(tokens, dtype=torch.int64)
    where = q, cache, _ints(SEQUENCES, BLOCKS_A_SEQUENCE), _ints(SEQUENCES), 192**-0.5
    mla_decode(*where, rank=512, tree=tree, query_start=_ints(SEQUENCES + 1), most_queries=drafts + 1)


def _mla_prefill() -> None:
    """DeepSeek-V3, divided among 8: 16 heads of 128 + 64, values of 128."""
    starts = _ints(SEQUENCES + 1)
    mla_prefill(_of(8192, 16, 192), _of(8192, 16, 256), _of(8192, 576)[:, 512:], starts, starts, 192**-0.5)


def _latent_store() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64, a latent of 512."""
    places, table = _of(SEQUENCES, dtype=torch.int64), _of(131072, 32, dtype=torch.float32)
    q, latents, norm = _of(SEQUENCES, 128, 192), _of(SEQUENCES, 576), _of(512, dtype=torch.float32)
    latent_store(q, latents, norm, 1e-6, table, table, places, places, _of(8192, BLOCK_SIZE, 576))


def _verify_sampling(most_rows: int) -> None:
    rows, vocab = SEQUENCES * most_rows, 128256
    drafts, seed = _of(rows, dtype=torch.int64), _of(1, dtype=torch.int64)
    q = _of(rows, vocab, dtype=torch.float32)
    starts, temperature = _ints(SEQUENCES + 1), _of(SEQUENCES, dtype=torch.float32)
    logits = _of(rows, vocab, dtype=torch.float32)
    verify_sampling(logits, starts, drafts, temperature, seed, most_rows=most_rows, draft_probabilities=q)


def _mamba2() -> None:
    """Mamba-2-2.7B: 80 heads of 64, a state of 128."""
    heads, head_dim, size = 80, 64, 128
    state, slots = _of(64, heads, head_dim, size, dtype=torch.float32), _of(SEQUENCES, dtype=torch.int64)
    x, dt, b = _of(SEQUENCES, heads, head_dim), _of(SEQUENCES, heads), _of(SEQUENCES, 1, size)
    vector = _of(heads, dtype=torch.float32)
    mamba2_update(state, slots, x, dt, vector, vector, b, b, vector, x, steps=_steps())


def _mamba1() -> None:
    """Falcon-Mamba-7B: 8192 channels, a state of 16."""
    channels, size = 8192, 16
    state, slots = _of(64, channels, size, dtype=torch.float32), _of(SEQUENCES, dtype=torch.int64)
    x, b = _of(SEQUENCES, channels, dtype=torch.float32), _of(SEQUENCES, size, dtype=torch.float32)
    a, d = _of(channels, size, dtype=torch.float32), _of(channels, dtype=torch.float32)
    mamba1_update(state, slots, x, x, b, b, x, a, d, steps=_steps())


def _short_conv() -> None:
    """Mamba-2-2.7B: 5120 channels and 256 of B and C, 4 taps."""
    channels = 5376
    state, slots = _of(64, 3, channels, dtype=torch.float32), _of(SEQUENCES, dtype=torch.int64)
    weight, bias = _of(channels, 4, dtype=torch.float32), _of(channels, dtype=torch.float32)
    short_conv(_of(SEQUENCES, channels), state, slots, weight, bias, steps=_steps())


def _steps() -> Steps:
    return Steps(_ints(SEQUENCES + 1), _of(SEQUENCES, dtype=torch.int64))


def _rwkv(*, delta: bool, size: int = 64) -> None:
    """32 heads of 64; or, as gated DeltaNet in Qwen3-Next, of 128."""
    state, slots = _of(64, 32, size, size, dtype=torch.float32), _of(SEQUENCES, dtype=torch.int64)
    x = _of(SEQUENCES, 32, size, dtype=torch.float32)
    if delta:
        rwkv7_update(state, slots, x, x, x, x, x, x, steps=_steps())
    else:
        rwkv6_update(state, slots, x, x, x, x, _of(32, size, dtype=torch.float32), steps=_steps())


def _block_copy() -> None:
    pools = BlockPools([_of(8192, BLOCK_SIZE, 8, 128) for _ in range(64)])
    pools.copy(_of(SEQUENCES, 2, dtype=torch.int64))


def _rms_norm(tokens: int, width: int, quantize: ActivationFormat | None) -> None:
    gain = _of(width, dtype=torch.float32)
    if quantize:
        rms_norm(_of(tokens, width), gain, 1e-5, residual=_of(tokens, width), quantize=quantize)
    else:
        rms_norm(_of(tokens, width), gain, 1e-5, residual=_of(tokens, width))


def _silu_mul(quantize: ActivationFormat | None) -> None:
    gate_up = _of(SEQUENCES, 2 * 14336)
    if quantize:
        silu_mul(gate_up, quantize=quantize)
    else:
        silu_mul(gate_up)


def _rope_store(format: KvFormat) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, 8, 128, META)
    table, longs = _of(131072, 64, dtype=torch.float32), _of(SEQUENCES, dtype=torch.int64)
    rope_store(_of(SEQUENCES, (32 + 16) * 128), table, table, longs, longs, kv)


def _kv_store() -> None:
    kv = KvBlocks.zeros("int8", 8192, BLOCK_SIZE, 8, 128, META)
    kv_store(_of(SEQUENCES, 8, 128), _of(SEQUENCES, 8, 128), _of(SEQUENCES, dtype=torch.int64), kv)


# Heads and widths are those of Llama-3.1-8B where no other model is named; the first of each kernel is its usual case.
CASES: dict[str, Callable[[], object]] = {
    "decode_attention bf16": lambda: _decode("bf16", 32, 8, 128),
    "decode_attention fp8": lambda: _decode("fp8", 32, 8, 128),
    "decode_attention int8": lambda: _decode("int8", 32, 8, 128),
    "decode_attention int4": lambda: _decode("int4", 32, 8, 128),
    "decode_attention bf16 head_dim 256": lambda: _decode("bf16", 16, 8, 256),
    "decode_attention bf16 one KV head": lambda: _decode("bf16", 64, 1, 128),
    "decode_attention bf16 sinks": lambda: _sunk(SEQUENCES),
    "decode_attention bf16 head_dim 256, capped": lambda: _capped(16, 8, 256),
    "prefill_attention bf16": lambda: _prefill("bf16", 32, 8, 128),
    "prefill_attention int8": lambda: _prefill("int8", 32, 8, 128),
    "prefill_attention fp8": lambda: _prefill("fp8", 32, 8, 128),
    "prefill_attention int4": lambda: _prefill("int4", 32, 8, 128),
    "prefill_attention bf16 head_dim 256 window 4096": lambda: _prefill("bf16", 16, 8, 256, 4096),
    "prefill_attention bf16 sinks, window 128": lambda: _sunk(8192),
    "verify_attention bf16 3 drafts": lambda: _verify("bf16", 3),
    "verify_attention bf16 63 drafts": lambda: _verify("bf16", 63),
    "verify_attention int4 7 drafts": lambda: _verify("int4", 7),
    "verify_attention int8 63 drafts": lambda: _verify("int8", 63),
    "verify_attention bf16 3 drafts, window 4096": lambda: _verify("bf16", 3, 4096),
    "verify_attention bf16 63 drafts, window 32": lambda: _verify("bf16", 63, 32),
    "kivi_attention 2 bits": lambda: _kivi_attention(2),
    "kivi_attention 4 bits": lambda: _kivi_attention(4),
    "kivi_attention 2 bits 7 drafts": lambda: _kivi_attention(2, 7),
    "kivi_round 2 bits": lambda: kivi_round(*_kivi(2)),
    "kivi_round 4 bits": lambda: kivi_round(*_kivi(4)),
    "linear_int4 m 1": lambda: _linear_int4(1, zero=False),
    "linear_int4 m 16 with zeros": lambda: _linear_int4(16, zero=True),
    "linear_int4 m 32": lambda: _linear_int4(32, zero=False),
    "linear_int4 m 64": lambda: _linear_int4(64, zero=False),
    "linear_int4 m 512": lambda: _linear_int4(512, zero=False),
    "linear_int8 groups of 32 m 1": lambda: _linear_int8(1, 32),
    "linear_int8 groups of 64 m 16": lambda: _linear_int8(16, 64),
    "linear_int8 groups of 128 m 16": lambda: _linear_int8(16, 128),
    "linear_int8 groups of 128 m 64": lambda: _linear_int8(64, 128),
    "linear_int8 groups of 64 m 64": lambda: _linear_int8(64, 64),
    "linear_int8 groups of 32 m 64": lambda: _linear_int8(64, 32),
    "linear_byte int8 m 1": lambda: _linear_byte("int8", 1),
    "linear_byte fp8 m 16": lambda: _linear_byte("fp8", 16),
    "linear_byte int8 m 32": lambda: _linear_byte("int8", 32),
    "linear_byte int8 m 64": lambda: _linear_byte("int8", 64),
    "linear_byte fp8 m 512": lambda: _linear_byte("fp8", 512),
    "linear_w8a8 int8 m 16": lambda: _linear_w8a8("int8", 16),
    "linear_w8a8 fp8 m 64": lambda: _linear_w8a8("fp8", 64),
    "linear_w8a8 fp8 with one scale, m 16": lambda: _linear_w8a8("fp8", 16, whole_step=True),
    "linear_w8a8 int8 m 4096": lambda: _linear_w8a8("int8", 4096),
    "linear_w8a8 fp8 m 4096": lambda: _linear_w8a8("fp8", 4096),
    "linear_w4a8 m 1": lambda: _linear_w4a8(1),
    "linear_w4a8 m 16 with zeros": lambda: _linear_w4a8(16, zero=True),
    "linear_w4a8 m 32": lambda: _linear_w4a8(32),
    "linear_w4a8 m 64": lambda: _linear_w4a8(64),
    "linear_w4a8 m 512": lambda: _linear_w4a8(512),
    "linear_w4a8 groups of 256 m 16": lambda: _linear_w4a8(16, group=256),
    "linear_fp8_blocks m 16": lambda: _linear_fp8_blocks(16),
    "linear_fp8_blocks m 4096": lambda: _linear_fp8_blocks(4096),
    "linear_fp8_blocks of halves m 16": lambda: _linear_fp8_blocks(16, rounded=False),
    "linear_fp8_blocks of halves m 64": lambda: _linear_fp8_blocks(64, rounded=False),
    "linear_fp8_blocks of halves m 4096": lambda: _linear_fp8_blocks(4096, rounded=False),
    "linear_sparse m 1": lambda: _linear_sparse(1),
    "linear_sparse m 64": lambda: _linear_sparse(64),
    "linear_mxfp4 m 1": lambda: _linear_mxfp4(1),
    "linear_mxfp4 m 64": lambda: _linear_mxfp4(64),
    "moe_linear half": lambda: _moe("half", SEQUENCES),
    "moe_linear fp8": lambda: _moe("fp8", SEQUENCES),
    "moe_linear int4": lambda: _moe("int4", SEQUENCES),
    "moe_linear int4 8192 tokens": lambda: _moe("int4", 8192),
    "moe_linear fp8_blocks": lambda: _moe("fp8_blocks", SEQUENCES),
    "moe_linear fp8_blocks 512 tokens": lambda: _moe("fp8_blocks", 512),
    "moe_linear fp8_blocks 8192 tokens": lambda: _moe("fp8_blocks", 8192),
    "moe_linear mxfp4": lambda: _moe("mxfp4", SEQUENCES),
    "moe_linear mxfp4 512 tokens": lambda: _moe("mxfp4", 512),
    "moe_linear mxfp4 8192 tokens": lambda: _moe("mxfp4", 8192),
    "moe_linear half 512 tokens": lambda: _moe("half", 512),
    "moe_linear half 8192 tokens": lambda: _moe("half", 8192),
    "moe_routing in groups": _route_in_groups,
    "mla_decode 128 heads": lambda: _mla(128),
    "mla_decode 16 heads": lambda: _mla(16),
    "mla_decode 128 heads 3 drafts": lambda: _mla_drafts(128, 3),
    "mla_prefill": _mla_prefill,
    "latent_store": _latent_store,
    "verify_sampling 4 drafts": lambda: _verify_sampling(5),
    "mamba2_update": _mamba2,
    "mamba1_update": _mamba1,
    "short_conv": _short_conv,
    "rwkv_update 7": lambda: _rwkv(delta=True),
    "rwkv_update 6": lambda: _rwkv(delta=False),
    "rwkv_update gated delta net": lambda: _rwkv(delta=True, size=128),
    "block_copy": _block_copy,
    "rms_norm": lambda: _rms_norm(SEQUENCES, 4096, None),
    "rms_norm of heads": lambda: _rms_norm(512, 128, None),
    "rms_norm to fp8, width 16384": lambda: _rms_norm(SEQUENCES, 16384, "fp8"),
    "silu_mul": lambda: _silu_mul(None),
    "silu_mul to int8": lambda: _silu_mul("int8"),
    "round_rows to int8": lambda: round_rows(_of(SEQUENCES, 14336), "int8"),
    "round_rows to fp8": lambda: round_rows(_of(SEQUENCES, 4096), "fp8"),
    "round_rows wider than a program holds": lambda: round_rows(_of(SEQUENCES, 53248), "int8"),
    "round_rows in steps": lambda: round_steps(_of(SEQUENCES, 4096), 128),
    "round_rows in blocks": lambda: round_blocks(_of(SEQUENCES, 7168)),
    "round_step to fp8": lambda: round_step(_of(SEQUENCES, 14336), "fp8"),
    "rope_store bf16": lambda: _rope_store("bf16"),
    "rope_store fp8": lambda: _rope_store("fp8"),
    "rope_store int8": lambda: _rope_store("int8"),
    "rope_store int4": lambda: _rope_store("int4"),
    "rope_store without q": _kv_store,
}


def launches(case: str, machine: Machine) -> list[Launch]:
    """What `machine` would launch for a case. No data is needed, so nothing waits for the GPU on the way."""
    with recording(machine) as record:
        CASES[case]()
    return record.launches
