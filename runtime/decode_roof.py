"""How close to the bandwidth roof is a whole decode step of an 8B model, replayed as a CUDA graph?"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.bench.benchmark import Failed, Timed, Timer
from membound.kernels.dispatch import kernels_for
from membound.roofline.models import GroupedQueryAttention, get_model
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import random_weights

MODEL = "Llama-3.1-8B"
CONTEXT = 1024
BLOCK_SIZE = 16


def decode_roof(device: torch.device, timer: Timer, layers: int | None = None) -> Timed | Failed:
    """One sequence's decode step with random bf16 weights: the bytes are its weights and its KV cache.

    `layers` makes fewer than the model has, and the case says so.
    """
    spec = get_model(MODEL)
    count = spec.layers if layers is None else layers
    case = f"bf16, {count} of {spec.layers} layers, batch 1, kv {CONTEXT}"
    try:
        weights = random_weights(spec, seed=0, layers=count).to(device)
        decoder = Decoder(spec, weights, kernels_for(str(device)))
        samples = sorted(timer([decode_step(decoder, CONTEXT)]))
    except Exception as failure:  # whatever it is, the table that it ends would else be lost
        return Failed(f"decode of {MODEL}", case, f"{type(failure).__name__}: {failure}".splitlines()[0])
    attention = spec.attention
    assert isinstance(attention, GroupedQueryAttention)
    kv_bytes = count * CONTEXT * 2 * attention.kv_heads * attention.head_dim * decoder.kernels.kv_dtype.itemsize
    middle = samples[len(samples) // 4 : -(-3 * len(samples) // 4)]
    return Timed(
        kernel=f"decode of {MODEL}",
        case=case,
        seconds=median(samples),
        spread_s=(middle[-1] - middle[0]) / 2,
        nbytes=decoder.weight_bytes + kv_bytes,
        flops=decoder.weight_bytes,  # a multiply-add for each weight of two bytes; attention's are few
        math="bf16",
        inputs=1,
        cached=False,
        peers={},
    )


def decode_step(decoder: Decoder, context: int) -> Callable[[], Tensor]:
    """The step of one sequence's token number `context`; called again it computes the same one."""
    blocks = -(-context // BLOCK_SIZE)
    kv, device = decoder.new_cache(blocks, BLOCK_SIZE), decoder.device
    last = torch.tensor([context - 1], device=device)
    batch = RaggedBatch(
        positions=last,
        slots=last,
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
        context_len=torch.tensor([context], dtype=torch.int32, device=device),
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        most_queries=1,
    )
    token, rows = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    return lambda: decoder.forward(token, batch, kv, rows)
