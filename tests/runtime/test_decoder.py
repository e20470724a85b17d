"""Does the decoder compute what transformers computes, and what does a bf16 KV cache cost?

Four tolerances, on logits that spread over about 20 (SmolLM2) or 10 (tiny models):
* 2e-4 with everything in fp32, the KV cache too: what is left is the order of summation.
* 0.3 between the weights as dequantized and the same rounded to bf16, as membound keeps them; measured 0.12.
* 0.3 with weights in fp32 and K and V rounded to bf16, as membound's kernels store them; measured 0.13.
* 1.0 where activations are rounded to bf16 before every linear as well (plain PyTorch kernels); measured 0.46.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch, WeightFormat
from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.roofline.models import ModelSpec, get_model
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import Weights, load_safetensors, random_weights
from membound.runtime.plain import generate_plain, single_sequence

SUMMATION, BF16_WEIGHTS, BF16_KV, BF16_ACTIVATIONS = 2e-4, 0.3, 0.3, 1.0
TINY = ("tiny_qwen2", "tiny_qwen3", "tiny_llama3")
PROMPTS = ("chat-fact", "chat-chinese", "chat-code", "code", "chinese", "mixed", "one-token", "long")


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


def last_logits(decoder: Decoder, ids: list[int], rows: int) -> Tensor:
    """Logits [rows, vocab] of the last positions, all of `ids` in one step."""
    num_blocks = -(-len(ids) // 16)
    batch = single_sequence(0, len(ids), num_blocks, decoder.device)
    return decoder.forward(torch.tensor(ids), batch, decoder.new_cache(num_blocks, 16), torch.arange(-rows, 0))


def assert_agrees(logits: Tensor, expected: list[dict[str, list[Any]]], tolerance: float) -> None:
    """The reference's largest logits are met, and our choice is the reference's or as good within the tolerance."""
    ids = torch.tensor([row["ids"] for row in expected])
    values = torch.tensor([row["logits"] for row in expected])
    assert (logits.gather(1, ids) - values).abs().max() < tolerance
    for choice, row_ids, row in zip(logits.argmax(1).tolist(), ids.tolist(), values.tolist(), strict=True):
        assert row[0] - row[row_ids.index(choice)] < 2 * tolerance


@pytest.fixture(scope="module")
def exact(smollm2: tuple[ModelSpec, Weights]) -> Decoder:
    return Decoder(*smollm2, ExactKernels(), "fp32")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_in_fp32_smollm2_is_what_transformers_computes(prompt: str, exact: Decoder, recorded: dict[str, Any]) -> None:
    entry = recorded[prompt]
    continuation = entry["greedy"]["ids"]
    rows = len(entry["bf16"]) + len(continuation)
    logits = last_logits(exact, entry["ids"] + continuation, rows)
    assert_agrees(logits[: len(entry["bf16"])], entry["bf16"], SUMMATION)
    assert_agrees(logits[: len(entry["bf16"])], entry["dequantized"], BF16_WEIGHTS)
    assert logits[-len(continuation) - 1 : -1].argmax(1).tolist() == continuation
    assert min(entry["greedy"]["leads"]) > 2 * SUMMATION  # no near tie decides the continuation


@pytest.mark.parametrize(("format", "prompts"), [("fp32", ("chat-fact", "mixed")), ("bf16", PROMPTS)])
def test_this_machines_kernels_are_within_the_cost_of_bf16(
    format: WeightFormat, prompts: tuple[str, ...], smollm2: tuple[ModelSpec, Weights], recorded: dict[str, Any]
) -> None:
    kernels = kernels_for("cpu")
    rounds = format == "bf16" and kernels.name == "torch"
    decoder = Decoder(*smollm2, kernels, format)
    for entry in (recorded[prompt] for prompt in prompts):
        logits = last_logits(decoder, entry["ids"], len(entry["bf16"]))
        assert_agrees(logits, entry["bf16"], BF16_ACTIVATIONS if rounds else BF16_KV)


def test_plain_generation_goes_as_transformers_goes(
    smollm2: tuple[ModelSpec, Weights], recorded: dict[str, Any]
) -> None:
    entry = recorded["chat-code"]  # no token leads by less than 0.19
    decoder = Decoder(*smollm2, kernels_for("cpu"), "bf16")
    assert list(generate_plain(decoder, entry["ids"], 16)) == entry["greedy"]["ids"][:16]


@pytest.mark.parametrize("name", TINY)
def test_bias_norms_and_stretched_rope_are_what_transformers_computes(name: str, reference: Path) -> None:
    expected = json.loads((reference / name / "expected.json").read_text(encoding="utf-8"))
    logits = torch.tensor(expected["logits"])
    model = load_safetensors(reference / name)
    for kernels, format, tolerance in (
        (ExactKernels(), "fp32", SUMMATION),
        (kernels_for("cpu"), "fp32", BF16_KV),
        (kernels_for("cpu"), "bf16", BF16_KV),
        (TorchKernels(), "bf16", BF16_KV),
    ):
        got = last_logits(Decoder(*model, kernels, format), expected["ids"], len(logits))
        assert (got - logits).abs().max() < tolerance
        assert torch.equal(got.argmax(1), logits.argmax(1))


@pytest.mark.parametrize("name", TINY)
def test_chunks_and_neighbours_do_not_change_a_sequence(name: str, reference: Path) -> None:
    """Two sequences in scattered blocks, one prefilled in two chunks beside the other's decode, as each alone."""
    decoder = Decoder(*load_safetensors(reference / name), ExactKernels(), "fp32")
    a, b = list(range(3, 24)), list(range(90, 101))
    table = torch.tensor([[5, 2, 7], [1, 6, 0]], dtype=torch.int32)  # blocks of 8
    kv = decoder.new_cache(8, 8)

    def step(*pieces: tuple[int, list[int], int, int]) -> Tensor:
        positions = [p for _, _, start, end in pieces for p in range(start, end)]
        slots = [int(table[s, p // 8]) * 8 + p % 8 for s, _, start, end in pieces for p in range(start, end)]
        lengths = [end - start for _, _, start, end in pieces]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        batch = RaggedBatch(
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=ends.int(),
            context_len=torch.tensor([end for *_, end in pieces], dtype=torch.int32),
            block_table=table[[s for s, *_ in pieces]],
        )
        tokens = torch.tensor([t for _, ids, start, end in pieces for t in ids[start:end]])
        return decoder.forward(tokens, batch, kv, ends[1:] - 1)

    step((1, b, 0, 10), (0, a, 0, 13))
    logits = step((0, a, 13, 21), (1, b, 10, 11))
    alone = torch.cat([last_logits(decoder, a, 1), last_logits(decoder, b, 1)])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)


def test_a_step_reads_all_weights_but_the_embedding_table() -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"layers": 2})
    weights = random_weights(spec, seed=0)
    norms = 4 * (2 * spec.layers + 1) * spec.hidden
    matrices = spec.params - norms // 4  # tied: the embedding counts once, as the lm_head
    kernels = TorchKernels()
    assert Decoder(spec, weights, kernels, "bf16").weight_bytes == 2 * matrices + norms
    assert Decoder(spec, weights, kernels, "fp32").weight_bytes == 4 * matrices + norms
    scales = 4 * (spec.layers * sum(n for _, n, _ in spec.layer_linears()) + spec.vocab)
    assert Decoder(spec, weights, kernels, "int8").weight_bytes == matrices + scales + norms


def test_random_weights_give_finite_logits_of_a_sensible_size() -> None:
    spec = get_model("Qwen3-8B").model_copy(update={"vocab": 512, "hidden": 256})
    decoder = Decoder(spec, random_weights(spec, seed=0, layers=3), TorchKernels(), "bf16")
    logits = last_logits(decoder, list(range(40)), 40)
    assert logits.dtype == torch.float32 and logits.shape == (40, 512)
    assert 0.3 < logits.std().item() < 3


def test_the_cache_of_a_layer_is_its_k_and_v_blocks() -> None:
    spec = get_model("SmolLM2-135M").model_copy(update={"vocab": 64})
    cache = Decoder(spec, random_weights(spec, seed=0, layers=2), TorchKernels(), "bf16").new_cache(5, 16)
    assert [layer.nbytes for layer in cache] == [2 * 2 * 5 * 16 * 3 * 64] * 2


def test_blocks_that_are_read_and_written_elsewhere_carry_a_sequence_with_them(reference: Path) -> None:
    """A sequence whose blocks are copied to others of another cache goes on as if nothing had happened."""
    decoder = Decoder(*load_safetensors(reference / "tiny_qwen3"), ExactKernels(), "fp32")
    ids = list(range(3, 36))
    here, there = decoder.new_cache(5, 16), decoder.new_cache(7, 16)
    decoder.forward(torch.tensor(ids[:-1]), single_sequence(0, 32, 5, decoder.device), here, torch.tensor([0]))
    for source, target in zip(here, there, strict=True):
        target.write_blocks([6, 3], source.read_blocks([0, 1]))
    moved = replace(
        single_sequence(32, 33, 3, decoder.device),
        slots=torch.tensor([1 * 16]),
        block_table=torch.tensor([[6, 3, 1]], dtype=torch.int32),
    )
    logits = decoder.forward(torch.tensor(ids[-1:]), moved, there, torch.tensor([0]))
    torch.testing.assert_close(logits, last_logits(decoder, ids, 1), rtol=0, atol=1e-4)


def test_the_hidden_states_after_some_layers_are_those_of_a_shorter_model(reference: Path) -> None:
    spec, weights = load_safetensors(reference / "tiny_qwen3")
    whole = Decoder(spec, weights, ExactKernels(), "fp32")
    short = Decoder(spec, replace(weights, layers=weights.layers[:1]), ExactKernels(), "fp32")
    ids, batch = torch.arange(3, 20), single_sequence(0, 17, 2, whole.device)
    early = whole.hidden(ids, batch, whole.new_cache(2, 16), layers=1)
    torch.testing.assert_close(early.normed, short.hidden(ids, batch, short.new_cache(2, 16)).normed)
    assert not torch.allclose(early.normed, whole.hidden(ids, batch, whole.new_cache(2, 16)).normed)
