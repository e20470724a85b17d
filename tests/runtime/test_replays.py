"""Does a step that is replayed from a tape compute the same bits as one that is run kernel by kernel?"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from membound.kernels.cpu import CpuKernels
from membound.kernels.cpu_build import KernelBuildError
from membound.kernels.cpu_tape import Scratch
from membound.roofline.models import GatedFfn, GroupedQueryAttention, ModelSpec
from membound.roofline.scenario import load_scenario
from membound.runtime import replays
from membound.runtime.decoder import Decoder
from membound.runtime.kv.build import store_for
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.weights import load_safetensors, random_weights

BLOCK_SIZE, BLOCKS_EACH, SEQUENCES = 4, 30, 5
SPEC = ModelSpec(
    name="tiny",
    layers=3,
    hidden=96,
    vocab=500,
    attention=GroupedQueryAttention(heads=6, kv_heads=2, head_dim=32),
    ffn=GatedFfn(intermediate=160),
    tie_embeddings=True,
    max_context=512,
    rope_theta=10000.0,
    norm_eps=1e-5,
    source="made for this test",
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[CpuKernels]:
    try:
        kernels = CpuKernels()
    except KernelBuildError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # those of a replay stay together, which one alone would not show
    yield kernels
    torch.set_num_threads(threads)


def steps(seed: int) -> list[list[Part]]:
    """Prompts, tokens and trees of guesses of a changing set of sequences, each with blocks of its own."""
    chance = random.Random(seed)
    lengths, found = [0] * SEQUENCES, []
    for _ in range(14):
        parts = []
        for sequence in chance.sample(range(SEQUENCES), chance.randint(1, SEQUENCES)):
            start = lengths[sequence]
            blocks = range(sequence * BLOCKS_EACH, sequence * BLOCKS_EACH + chance.randint(26, BLOCKS_EACH))
            if not start:
                parts.append(Part(0, chance.randint(1, 40), blocks))
            elif chance.random() < 0.4:
                parts.append(Part(start, 4, blocks, guesses=3, parents=(-1, -1, 1)))
            else:
                parts.append(Part(start, 1, blocks))
            lengths[sequence] = start + (1 if start else parts[-1].tokens)
        found.append(parts)
    return found


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize("seed", range(2))
def test_replayed_steps_have_the_bits_of_those_run_kernel_by_kernel(
    kernels: CpuKernels, format: Any, kv: str | None, seed: int
) -> None:
    weights = random_weights(SPEC, seed=1)
    new_store = None
    if kv is not None:
        technique = {"name": "kv_quantization", "format": kv}
        setup = load_scenario("live-cpu").with_value("techniques", [technique]).setup
        new_store = store_for(setup, kernels, torch.device("cpu"))
    played = Decoder(SPEC, weights, kernels, format, new_store)
    plain = Decoder(SPEC, weights, kernels, format, new_store, replayed=False)
    caches = [decoder.new_cache(SEQUENCES * BLOCKS_EACH, BLOCK_SIZE) for decoder in (played, plain)]
    for number, parts in enumerate(steps(seed)):
        batch = ragged_batch(parts, BLOCK_SIZE)
        ids = torch.arange(batch.num_tokens) * 7 % SPEC.vocab
        for layers in (2, None):
            ours, theirs = (
                decoder.hidden(ids, batch, cache, layers)
                for decoder, cache in zip((played, plain), caches, strict=True)
            )
            assert torch.equal(ours.normed, theirs.normed), f"step {number} of {layers} layers"
            assert torch.equal(ours.residual, theirs.residual)
    known = played._replays._known[caches[0][0]]
    assert all(each.recorded for each in known.values()), "these steps can be replayed"


def test_what_torch_computes_is_not_lost(kernels: CpuKernels, reference: Path) -> None:
    spec, weights = load_safetensors(reference / "tiny_qwen3")  # its norms of q and k are joined by torch
    played, plain = Decoder(spec, weights, kernels), Decoder(spec, weights, kernels, replayed=False)
    caches = [decoder.new_cache(8, BLOCK_SIZE) for decoder in (played, plain)]
    for start in (0, 5, 6):
        batch = ragged_batch([Part(start, 5 if start == 0 else 1, range(8))], BLOCK_SIZE)
        ids = torch.arange(batch.num_tokens) + start
        ours, theirs = (
            decoder.hidden(ids, batch, cache) for decoder, cache in zip((played, plain), caches, strict=True)
        )
        assert torch.equal(ours.normed, theirs.normed)
    (known,) = played._replays._known[caches[0][0]].values()
    assert known.recorded is None and known.torch_from == 1


def test_steps_that_torch_multiplies_faster_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "FEWEST_ROWS", 8)
    kernels = CpuKernels()
    monkeypatch.setattr(kernels, "_matrix_unit_tokens", {"bf16": 6})
    weights = random_weights(SPEC, seed=1)
    played, plain = Decoder(SPEC, weights, kernels), Decoder(SPEC, weights, kernels, replayed=False)
    caches = [decoder.new_cache(BLOCKS_EACH, BLOCK_SIZE) for decoder in (played, plain)]
    for tokens in (20, 1, 5, 6, 7, 2):
        batch = ragged_batch([Part(0, tokens, range(BLOCKS_EACH))], BLOCK_SIZE)
        ids = torch.arange(tokens)
        ours, theirs = (
            decoder.hidden(ids, batch, cache) for decoder, cache in zip((played, plain), caches, strict=True)
        )
        assert torch.equal(ours.normed, theirs.normed), f"{tokens} tokens"
    (known,) = played._replays._known[caches[0][0]].values()
    assert known.recorded is not None and known.recorded.rows == 5 and known.torch_from == 6


def test_a_longer_step_is_recorded_anew_and_the_longest_are_not(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "FEWEST_ROWS", 2)
    monkeypatch.setattr(replays, "MOST_ROWS", 16)
    decoder = Decoder(SPEC, random_weights(SPEC, seed=1), kernels)
    cache = decoder.new_cache(BLOCKS_EACH, BLOCK_SIZE)
    rows = []
    for tokens in (1, 2, 3, 9, 4, 17):
        batch = ragged_batch([Part(0, tokens, range(BLOCKS_EACH))], BLOCK_SIZE)
        decoder.hidden(torch.zeros(tokens, dtype=torch.int64), batch, cache)
        rows += [known.recorded.rows for known in decoder._replays._known[cache[0]].values() if known.recorded]
    assert rows == [2, 2, 4, 16, 16, 16]


def test_a_tape_goes_with_the_cache_that_it_writes_to(kernels: CpuKernels) -> None:
    decoder = Decoder(SPEC, random_weights(SPEC, seed=1), kernels)
    cache = decoder.new_cache(BLOCKS_EACH, BLOCK_SIZE)
    batch = ragged_batch([Part(0, 3, range(BLOCKS_EACH))], BLOCK_SIZE)
    decoder.hidden(torch.zeros(3, dtype=torch.int64), batch, cache)
    assert len(decoder._replays._known) == 1
    del cache
    gc.collect()
    assert len(decoder._replays._known) == 0


def test_each_operation_of_a_tape_is_timed(kernels: CpuKernels) -> None:
    x, weight = torch.ones(2, 256), kernels.pack(torch.ones(512, 256), "bf16")
    with kernels.recording(computed=False) as tape:
        y = kernels.silu_mul(kernels.linear(x, weight))
    seconds = tape.timed_s()
    assert len(seconds) == len(tape) == 2 and all(0 < second < 1 for second in seconds)
    assert torch.allclose(y, torch.nn.functional.silu(torch.tensor(256.0)) * 256), "it was computed when played"


def test_memory_is_given_out_again_only_when_nothing_lies_in_it() -> None:
    scratch = Scratch()
    first = scratch.empty((3, 5))
    view = first[1:]
    address = first.data_ptr()
    del first
    assert scratch.empty((3, 5)).data_ptr() != address, "a view still lies there"
    del view
    assert scratch.empty((3, 5)).data_ptr() == address
