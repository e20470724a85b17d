"""What would the simplest loop generate? The oracle that every faster way of decoding is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.decoder import Decoder
from membound.runtime.parallel.leader import DividedDecoder

BLOCK_SIZE = 16


def greedy(logits: Tensor) -> int:
    """The most likely token of logits [vocab]; the lowest id among equals."""
    return int(logits.argmax())


def generate_plain(
    decoder: Decoder | DividedDecoder,
    prompt_ids: Sequence[int],
    max_tokens: int,
    sample: Callable[[Tensor], int] = greedy,
) -> Iterator[int]:
    """Yields `max_tokens` tokens after the prompt: one sequence, whole prompt first, then one token a step.

    It does not stop at an end token; the caller does.
    """
    num_blocks = -(-(len(prompt_ids) + max_tokens) // BLOCK_SIZE)
    kv = decoder.new_cache(num_blocks, BLOCK_SIZE)
    tokens, start = list(prompt_ids), 0
    for _ in range(max_tokens):
        batch = single_sequence(start, len(tokens), num_blocks, decoder.device)
        new = torch.tensor(tokens[start:], device=decoder.device)
        logits = decoder.forward(new, batch, kv, torch.tensor([len(new) - 1], device=decoder.device))
        start = len(tokens)
        tokens.append(sample(logits[0]))
        yield tokens[-1]


def single_sequence(start: int, end: int, num_blocks: int, device: torch.device) -> RaggedBatch:
    """Tokens `start` to `end` of one sequence whose blocks are 0, 1, 2, ... in order."""
    positions = torch.arange(start, end, device=device)
    return RaggedBatch(
        positions=positions,
        slots=positions,
        query_start=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        context_len=torch.tensor([end], dtype=torch.int32, device=device),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
    )
