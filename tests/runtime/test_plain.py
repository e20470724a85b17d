"""Is the simplest loop right, so that it can be the oracle of the others?"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from membound.kernels.reference import TorchKernels
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import load_safetensors
from membound.runtime.plain import generate_plain, greedy, single_sequence

PROMPT = [5, 17, 99, 3]


def test_each_token_is_the_greedy_choice_after_all_before_it(reference: Path) -> None:
    decoder = Decoder(*load_safetensors(reference / "tiny_qwen3"), TorchKernels(), "fp32")
    tokens = list(generate_plain(decoder, PROMPT, 30))
    ids = PROMPT + tokens
    batch = single_sequence(0, len(ids), 3, decoder.device)
    logits = decoder.forward(torch.tensor(ids), batch, decoder.new_cache(3, 16), torch.arange(len(ids)))
    assert logits[len(PROMPT) - 1 : -1].argmax(1).tolist() == tokens


def test_tokens_come_one_by_one_and_the_sampler_decides(reference: Path) -> None:
    decoder = Decoder(*load_safetensors(reference / "tiny_qwen2"), TorchKernels(), "fp32")
    least = generate_plain(decoder, PROMPT, 30, sample=lambda logits: int(logits.argmin()))
    greedily = generate_plain(decoder, PROMPT, 30)
    assert list(itertools.islice(least, 3)) != list(itertools.islice(greedily, 3))
    assert list(generate_plain(decoder, PROMPT, 0)) == []


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert greedy(torch.tensor([0.0, 2.0, 2.0])) == 1
