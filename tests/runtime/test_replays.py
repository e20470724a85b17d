"""Does a step that is replayed from a tape compute the same bits as one that is run kernel by kernel?"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from membound.kernels.cpu.build import KernelBuildError
from membound.kernels.cpu.kernels import CpuKernels
from membound.kernels.cpu.tape import Scratch
from membound.kernels.reference import TorchKernels
from membound.roofline.models import GatedFfn, GroupedQueryAttention, LatentAttention, ModelSpec, MoeFfn
from membound.roofline.models.ffn import DenseFfn, NoFfn
from membound.roofline.models.recurrent import GatedDeltaNet, Mamba1, Mamba2
from membound.roofline.scenario import load_scenario
from membound.runtime import replays
from membound.runtime.decoder import Decoder
from membound.runtime.kv.build import store_for
from membound.runtime.loading.weights import load_safetensors, random_weights
from membound.runtime.ragged import Part, ragged_batch

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
                parts.append(Part(0, chance.randint(1, 40), blocks, sequence))
            elif chance.random() < 0.4:
                parts.append(Part(start, 4, blocks, sequence, guesses=3, parents=(-1, -1, 1)))
            else:
                parts.append(Part(start, 1, blocks, sequence))
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


POLICIES = ("streaming", "h2o", "snapkv", "quest")


def evicting(kernels: CpuKernels, policy: str, format: str | None, *, replayed: bool = True) -> Decoder:
    """A decoder whose attention reads 16 tokens or 4 pages of a sequence."""
    page = {"page": BLOCK_SIZE} if policy == "quest" else {}
    techniques = [{"name": "kv_eviction", "policy": policy, "budget": 16, **page}]
    if format is not None:
        techniques.append({"name": "kv_quantization", "format": format})
    setup = load_scenario("live-cpu").with_value("techniques", techniques).setup
    new_store = store_for(setup, kernels, torch.device("cpu"))
    return Decoder(SPEC, random_weights(SPEC, seed=1), kernels, "bf16", new_store, replayed=replayed)


def decoding_steps(seed: int) -> list[list[Part]]:
    """Prompts, beside tokens or alone, and then tokens of a changing set of sequences whose tables differ in width."""
    chance, lengths = random.Random(seed), [0] * SEQUENCES
    found = []
    for number in range(60):
        parts = []
        for sequence in chance.sample(range(SEQUENCES), chance.randint(1, SEQUENCES)):
            start = lengths[sequence]
            if not start and number > 8 and number % 11:
                continue
            blocks = range(sequence * BLOCKS_EACH, sequence * BLOCKS_EACH + chance.randint(26, BLOCKS_EACH))
            parts.append(Part(start, 1 if start else chance.randint(2, 40), blocks, sequence))
            lengths[sequence] = parts[-1].start + parts[-1].tokens
        found += [parts] if parts else []
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("format", [None, "int8"])
def test_steps_of_caches_that_evict_or_choose_are_played_with_the_bits_of_those_run_kernel_by_kernel(
    kernels: CpuKernels, policy: str, format: str | None
) -> None:
    played, plain = (evicting(kernels, policy, format, replayed=replayed) for replayed in (True, False))
    caches = [decoder.new_cache(SEQUENCES * BLOCKS_EACH, BLOCK_SIZE, SEQUENCES) for decoder in (played, plain)]
    for number, parts in enumerate(decoding_steps(seed=3)):
        batch = ragged_batch(parts, BLOCK_SIZE)
        ids = torch.arange(batch.num_tokens) * 7 % SPEC.vocab
        ours, theirs = (
            decoder.hidden(ids, batch, cache) for decoder, cache in zip((played, plain), caches, strict=True)
        )
        assert torch.equal(ours.normed, theirs.normed), f"step {number}"
        assert torch.equal(ours.residual, theirs.residual)
    for mine, yours in zip(caches[0], caches[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.kept, yours.kept, strict=True))
    known = played._replays._known[caches[0][0]]
    assert any(each.recorded for each in known.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_torch_computes_nothing_in_the_layers_of_a_played_step(kernels: CpuKernels, policy: str) -> None:
    """Neither does it allocate there: its operations are as many with one layer as with three."""
    decoder, counts = evicting(kernels, policy, None), []
    cache = decoder.new_cache(SEQUENCES * BLOCKS_EACH, BLOCK_SIZE, SEQUENCES)
    blocks = range(BLOCKS_EACH)
    decoder.hidden(torch.arange(60), ragged_batch([Part(0, 60, blocks)], BLOCK_SIZE), cache)
    for layers in (1, 3):
        for position in (60, 61):
            batch = ragged_batch([Part(position, 1, blocks)], BLOCK_SIZE)
            with Counting() as counting:
                decoder.hidden(torch.tensor([5]), batch, cache, layers)
        counts.append(counting.operations)
    assert counts[0] == counts[1]


class Counting(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def gqa(**extra: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(heads=6, kv_heads=2, head_dim=32, **extra)


def mla(**extra: Any) -> LatentAttention:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    return LatentAttention(heads=6, **sizes, **extra)


MOE = MoeFfn(experts=8, top_k=3, intermediate=48)
FAMILIES: dict[str, dict[str, Any]] = {
    "biases, as in Qwen2": {"attention": gqa(qkv_bias=True, o_bias=True)},
    "norms of q and k, as in Qwen3": {"attention": gqa(qk_norm=True)},
    "norms of all heads at once, as in OLMo 2": {"attention": gqa(qk_norm=True, qk_norm_over="heads")},
    "four norms, a window and GELU, as in Gemma 3": {
        "attention": gqa(qk_norm=True, window=8),
        "norms_per_layer": 4,
        "activation": "gelu_pytorch_tanh",
    },
    "side by side with layer norms, as in Falcon": {
        "norms_per_layer": 1,
        "norm": "layer",
        "ffn": DenseFfn(intermediate=160),
        "activation": "gelu",
    },
    "a mixture, as Mixtral": {"ffn": MOE},
    "a mixture beside a gated shared expert, as in Qwen2-MoE": {
        "ffn": MOE.model_copy(update={"shared_intermediate": 80, "shared_gate": True})
    },
    "sinks, as in gpt-oss": {"attention": gqa(sinks=True, qkv_bias=True)},
    "latents, as in DeepSeek-V2-Lite": {"attention": mla()},
    "latents of a compressed q, as in DeepSeek-V3": {"attention": mla(q_lora_rank=40)},
    "a gate on attention's output, as in Qwen3-Next": {"attention": gqa(qk_norm=True, output_gate=True)},
    "the gated delta rule, as in Qwen3-Next": {
        "attention": GatedDeltaNet(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=24)
    },
    "a state a channel, as in Mamba": {"attention": Mamba1(d_inner=64, d_state=16, dt_rank=6), "ffn": NoFfn()},
    "the same with norms, as in Falcon-Mamba": {
        "attention": Mamba1(d_inner=64, d_state=16, dt_rank=6, inner_norms=True),
        "ffn": NoFfn(),
    },
    "states, as in Mamba-2": {"attention": Mamba2(heads=4, head_dim=16, d_state=24, groups=2), "ffn": NoFfn()},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trees", [False, True])
def test_layers_of_every_family_are_replayed(kernels: CpuKernels, family: str, trees: bool) -> None:
    spec = SPEC.model_copy(update=FAMILIES[family])
    if trees and isinstance(spec.attention, GatedDeltaNet | Mamba1 | Mamba2):
        pytest.skip("a state knows no branches")
    weights = random_weights(spec, seed=1)
    played, plain = Decoder(spec, weights, kernels), Decoder(spec, weights, kernels, replayed=False)
    caches = [decoder.new_cache(SEQUENCES * BLOCKS_EACH, BLOCK_SIZE, SEQUENCES) for decoder in (played, plain)]
    # A single row hides how far apart rows are, and what is recorded with it is played for a few.
    blocks = [range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH) for i in range(3)]
    one, few = [Part(0, 1, blocks[0], 0)], [Part(0, 3, blocks[i], i) for i in range(3)]
    for number, parts in enumerate([one, few, *steps(3)]):
        if not trees:
            parts = [part._replace(guesses=0, parents=None) for part in parts]
        batch = ragged_batch(parts, BLOCK_SIZE)
        ids = torch.arange(batch.num_tokens) * 7 % SPEC.vocab
        ours, theirs = (
            decoder.hidden(ids, batch, cache) for decoder, cache in zip((played, plain), caches, strict=True)
        )
        assert torch.equal(ours.normed, theirs.normed), f"step {number}"
        assert torch.equal(ours.residual, theirs.residual)
    assert any(each.recorded for each in played._replays._known[caches[0][0]].values())
    for ours, theirs in zip(played.mixtures().values(), plain.mixtures().values(), strict=True):
        assert torch.equal(ours.statistics.load, theirs.statistics.load)
        assert int(ours.statistics.tokens) == int(theirs.statistics.tokens) > 0


def test_what_torch_computes_is_not_lost(kernels: CpuKernels, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = load_safetensors(reference / "tiny_qwen3")
    monkeypatch.setattr(kernels, "silu_mul", TorchKernels().silu_mul)
    played, plain = Decoder(spec, weights, kernels), Decoder(spec, weights, kernels, replayed=False)
    caches = [decoder.new_cache(8, BLOCK_SIZE) for decoder in (played, plain)]
    for start in (0, 5, 6, 7):
        batch = ragged_batch([Part(start, 5 if start == 0 else 1, range(8))], BLOCK_SIZE)
        ids = torch.arange(batch.num_tokens) + start
        ours, theirs = (
            decoder.hidden(ids, batch, cache) for decoder, cache in zip((played, plain), caches, strict=True)
        )
        assert torch.equal(ours.normed, theirs.normed)
    (known,) = played._replays._known[caches[0][0]].values()
    assert known.recorded is None and known.torch_from == 1


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


def test_what_is_computed_once_does_not_keep_layers_from_the_tape(kernels: CpuKernels) -> None:
    """Torch reads the absorbed matrices back in the first step."""
    spec = SPEC.model_copy(update=FAMILIES["latents, as in DeepSeek-V2-Lite"])
    decoder = Decoder(spec, random_weights(spec, seed=1), kernels)
    cache = decoder.new_cache(BLOCKS_EACH, BLOCK_SIZE)
    found = []
    for start in range(3):
        batch = ragged_batch([Part(start, 1, range(BLOCKS_EACH))], BLOCK_SIZE)
        decoder.hidden(torch.zeros(1, dtype=torch.int64), batch, cache)
        (known,) = decoder._replays._known[cache[0]].values()
        found.append(known.recorded is not None)
    assert found == [False, True, True]


def test_memory_is_given_out_again_only_when_nothing_lies_in_it() -> None:
    scratch = Scratch()
    first = scratch.empty((3, 5))
    view = first[1:]
    address = first.data_ptr()
    del first
    assert scratch.empty((3, 5)).data_ptr() != address, "a view still lies there"
    del view
    assert scratch.empty((3, 5)).data_ptr() == address
