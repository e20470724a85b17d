"""With which shapes does serving launch each kernel? What is compiled without a GPU and timed with one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from membound.kernels.base import RaggedBatch
from membound.kernels.kivi import KiviBlocks
from membound.kernels.triton.activation import ActivationFormat
from membound.kernels.triton.block_copy import BlockPools
from membound.kernels.triton.decode_attention import decode_attention
from membound.kernels.triton.head_norm import head_norm
from membound.kernels.triton.kivi_attention import kivi_attention
from membound.kernels.triton.kivi_round import kivi_round
from membound.kernels.triton.kv_blocks import KvBlocks, KvFormat
from membound.kernels.triton.latent_store import latent_store
from membound.kernels.triton.launch import Launch, recording
from membound.kernels.triton.machine import Machine
from membound.kernels.triton.mamba1_update import mamba1_update
from membound.kernels.triton.mamba2_update import mamba2_update
from membound.kernels.triton.meta import BLOCK_SIZE, BLOCKS_A_SEQUENCE, META, SEQUENCES, ints, of
from membound.kernels.triton.mla_decode import mla_decode
from membound.kernels.triton.mla_prefill import mla_prefill
from membound.kernels.triton.prefill_attention import prefill_attention
from membound.kernels.triton.production_linear import LINEAR_CASES
from membound.kernels.triton.rms_norm import rms_norm
from membound.kernels.triton.rope_store import kv_store, rope_store
from membound.kernels.triton.round_rows import round_blocks, round_rows, round_step, round_steps
from membound.kernels.triton.rwkv_update import rwkv6_update, rwkv7_update
from membound.kernels.triton.short_conv import short_conv
from membound.kernels.triton.silu_mul import silu_mul
from membound.kernels.triton.steps import Steps
from membound.kernels.triton.verify_attention import verify_attention
from membound.kernels.triton.verify_sampling import verify_sampling


def _decode(format: KvFormat, heads: int, kv_heads: int, head_dim: int) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q = of(SEQUENCES, heads, head_dim)
    decode_attention(q, kv, ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES), head_dim**-0.5)


def _sunk(tokens: int) -> None:
    """gpt-oss-20b: 64 query heads with a sink each, 8 KV heads of 64; every other layer has a window."""
    kv, sinks = KvBlocks.zeros("bf16", 8192, BLOCK_SIZE, 8, 64, META), of(64, dtype=torch.float32)
    q, table, lengths = of(tokens, 64, 64), ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES)
    if tokens == SEQUENCES:
        decode_attention(q, kv, table, lengths, 0.125, sinks=sinks)
    else:
        prefill_attention(q, kv, table, ints(SEQUENCES + 1), lengths, 0.125, window=128, sinks=sinks)


def _capped(heads: int, kv_heads: int, head_dim: int) -> None:
    """Gemma-2-9B caps its scores at 50."""
    kv = KvBlocks.zeros("bf16", 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q = of(SEQUENCES, heads, head_dim)
    where = kv, ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES), 0.0625
    decode_attention(q, *where, softcap=50.0)


def _prefill(format: KvFormat, heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, kv_heads, head_dim, META)
    q, table, starts = of(8192, heads, head_dim), ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES + 1)
    prefill_attention(q, kv, table, starts, ints(SEQUENCES), head_dim**-0.5, window=window)


def _verify(format: KvFormat, drafts: int, window: int | None = None) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, 8, 128, META)
    tokens = SEQUENCES * (drafts + 1)
    q, tree, table = of(tokens, 32, 128), of(tokens, dtype=torch.int64), ints(SEQUENCES, BLOCKS_A_SEQUENCE)
    starts, lengths = ints(SEQUENCES + 1), ints(SEQUENCES)
    verify_attention(q, tree, kv, table, starts, lengths, 128**-0.5, most_queries=drafts + 1, window=window)


def _kivi(bits: int, drafts: int = 0) -> tuple[KiviBlocks, RaggedBatch]:
    kv = KiviBlocks.zeros(bits, 32, 128, 8192, BLOCK_SIZE, 8, 128, 64, META)
    tokens = SEQUENCES * (drafts + 1)
    places, seats = of(tokens, dtype=torch.int64), of(SEQUENCES, dtype=torch.int64)
    table = ints(SEQUENCES, BLOCKS_A_SEQUENCE)
    batch = RaggedBatch(places, places, ints(SEQUENCES + 1), ints(SEQUENCES), table, drafts + 1, seats)
    return kv, batch


def _kivi_attention(bits: int, drafts: int = 0) -> None:
    kv, batch = _kivi(bits, drafts)
    kivi_attention(of(batch.num_tokens, 32, 128), kv, batch, 128**-0.5)


def _mla(heads: int) -> None:
    q, cache = of(SEQUENCES, heads, 576), of(8192, BLOCK_SIZE, 576)
    mla_decode(q, cache, ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES), 192**-0.5, rank=512)


def _mla_drafts(heads: int, drafts: int) -> None:
    tokens = SEQUENCES * (drafts + 1)
    q, cache, tree = of(tokens, heads, 576), of(8192, BLOCK_SIZE, 576), of(tokens, dtype=torch.int64)
    where = q, cache, ints(SEQUENCES, BLOCKS_A_SEQUENCE), ints(SEQUENCES), 192**-0.5
    mla_decode(*where, rank=512, tree=tree, query_start=ints(SEQUENCES + 1), most_queries=drafts + 1)


def _mla_prefill() -> None:
    """DeepSeek-V3, divided among 8: 16 heads of 128 + 64, values of 128."""
    starts = ints(SEQUENCES + 1)
    mla_prefill(of(8192, 16, 192), of(8192, 16, 256), of(8192, 576)[:, 512:], starts, starts, 192**-0.5)


def _latent_store() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64, a latent of 512."""
    places, table = of(SEQUENCES, dtype=torch.int64), of(131072, 32, dtype=torch.float32)
    q, latents, norm = of(SEQUENCES, 128, 192), of(SEQUENCES, 576), of(512, dtype=torch.float32)
    latent_store(q, latents, norm, 1e-6, table, table, places, places, of(8192, BLOCK_SIZE, 576))


def _verify_sampling(most_rows: int) -> None:
    rows, vocab = SEQUENCES * most_rows, 128256
    drafts, seed = of(rows, dtype=torch.int64), of(1, dtype=torch.int64)
    q = of(rows, vocab, dtype=torch.float32)
    starts, temperature = ints(SEQUENCES + 1), of(SEQUENCES, dtype=torch.float32)
    logits = of(rows, vocab, dtype=torch.float32)
    verify_sampling(logits, starts, drafts, temperature, seed, most_rows=most_rows, draft_probabilities=q)


def _mamba2() -> None:
    """Mamba-2-2.7B: 80 heads of 64, a state of 128."""
    heads, head_dim, size = 80, 64, 128
    state, slots = of(64, heads, head_dim, size, dtype=torch.float32), of(SEQUENCES, dtype=torch.int64)
    x, dt, b = of(SEQUENCES, heads, head_dim), of(SEQUENCES, heads), of(SEQUENCES, 1, size)
    vector = of(heads, dtype=torch.float32)
    mamba2_update(state, slots, x, dt, vector, vector, b, b, vector, x, steps=_steps())


def _mamba1() -> None:
    """Falcon-Mamba-7B: 8192 channels, a state of 16."""
    channels, size = 8192, 16
    state, slots = of(64, channels, size, dtype=torch.float32), of(SEQUENCES, dtype=torch.int64)
    x, b = of(SEQUENCES, channels, dtype=torch.float32), of(SEQUENCES, size, dtype=torch.float32)
    a, d = of(channels, size, dtype=torch.float32), of(channels, dtype=torch.float32)
    mamba1_update(state, slots, x, x, b, b, x, a, d, steps=_steps())


def _short_conv() -> None:
    """Mamba-2-2.7B: 5120 channels and 256 of B and C, 4 taps."""
    channels = 5376
    state, slots = of(64, 3, channels, dtype=torch.float32), of(SEQUENCES, dtype=torch.int64)
    weight, bias = of(channels, 4, dtype=torch.float32), of(channels, dtype=torch.float32)
    short_conv(of(SEQUENCES, channels), state, slots, weight, bias, steps=_steps())


def _steps() -> Steps:
    return Steps(ints(SEQUENCES + 1), of(SEQUENCES, dtype=torch.int64))


def _rwkv(*, delta: bool, size: int = 64) -> None:
    """32 heads of 64; or, as gated DeltaNet in Qwen3-Next, of 128."""
    state, slots = of(64, 32, size, size, dtype=torch.float32), of(SEQUENCES, dtype=torch.int64)
    x = of(SEQUENCES, 32, size, dtype=torch.float32)
    if delta:
        rwkv7_update(state, slots, x, x, x, x, x, x, steps=_steps())
    else:
        rwkv6_update(state, slots, x, x, x, x, of(32, size, dtype=torch.float32), steps=_steps())


def _block_copy() -> None:
    pools = BlockPools([of(8192, BLOCK_SIZE, 8, 128) for _ in range(64)])
    pools.copy(of(SEQUENCES, 2, dtype=torch.int64))


def _rms_norm(tokens: int, width: int, quantize: ActivationFormat | None) -> None:
    gain = of(width, dtype=torch.float32)
    if quantize:
        rms_norm(of(tokens, width), gain, 1e-5, residual=of(tokens, width), quantize=quantize)
    else:
        rms_norm(of(tokens, width), gain, 1e-5, residual=of(tokens, width))


def _head_norm() -> None:
    """Qwen3-8B: 32 heads of q, in a row with 8 of k and of v."""
    head_norm(of(SEQUENCES, 48 * 128), 0, 32, of(1, 128, dtype=torch.float32), 1e-6)


def _silu_mul(quantize: ActivationFormat | None) -> None:
    gate_up = of(SEQUENCES, 2 * 14336)
    if quantize:
        silu_mul(gate_up, quantize=quantize)
    else:
        silu_mul(gate_up)


def _rope_store(format: KvFormat) -> None:
    kv = KvBlocks.zeros(format, 8192, BLOCK_SIZE, 8, 128, META)
    table, longs = of(131072, 64, dtype=torch.float32), of(SEQUENCES, dtype=torch.int64)
    rope_store(of(SEQUENCES, (32 + 16) * 128), table, table, longs, longs, kv)


def _kv_store() -> None:
    kv = KvBlocks.zeros("int8", 8192, BLOCK_SIZE, 8, 128, META)
    kv_store(of(SEQUENCES, 8, 128), of(SEQUENCES, 8, 128), of(SEQUENCES, dtype=torch.int64), kv)


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
    **LINEAR_CASES,
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
    "head_norm": _head_norm,
    "silu_mul": lambda: _silu_mul(None),
    "silu_mul to int8": lambda: _silu_mul("int8"),
    "round_rows to int8": lambda: round_rows(of(SEQUENCES, 14336), "int8"),
    "round_rows to fp8": lambda: round_rows(of(SEQUENCES, 4096), "fp8"),
    "round_rows wider than a program holds": lambda: round_rows(of(SEQUENCES, 53248), "int8"),
    "round_rows in steps": lambda: round_steps(of(SEQUENCES, 4096), 128),
    "round_rows in blocks": lambda: round_blocks(of(SEQUENCES, 7168)),
    "round_step to fp8": lambda: round_step(of(SEQUENCES, 14336), "fp8"),
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
