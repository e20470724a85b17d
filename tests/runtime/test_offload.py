"""Experts that lie elsewhere are the same experts: equal tokens, and moves that obey the laws of a cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.engine import Runtime
from membound.runtime.offload import place
from membound.runtime.offload.cache import ExpertCache, Moves
from membound.runtime.offload.place import DiskPlace, HostPlace, buffers_like, tensors_of

H100 = get_hardware("H100-SXM5")
CPU = torch.device("cpu")
EXPERTS = 8
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "vocab_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    chosen = load_scenario("live-cpu").model_copy(update={"model": str(config), "weights": "random", "techniques": ()})
    chosen = chosen.with_value(
        "workload.prompts", {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 4, "high": 20}}
    )
    chosen = chosen.with_value("workload.output_tokens", {"kind": "uniform", "low": 2, "high": 24})
    return chosen.with_value("workload.requests", 6).with_value("workload.arrivals.concurrency", 2)


def offloaded(plain: Scenario, **fields: Any) -> Scenario:
    return plain.with_value("techniques", [{"name": "expert_offload", **fields}])


@pytest.fixture(scope="module")
def tokens(runtime: Runtime, plain: Scenario) -> dict[int, list[int]]:
    return runtime.run(plain, H100).outputs


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("cached", [1, 3, EXPERTS])
@pytest.mark.parametrize("prefetch", [False, True])
def test_tokens_are_those_of_a_model_that_is_all_there(
    where: str, cached: int, prefetch: bool, runtime: Runtime, plain: Scenario, tokens: dict[int, list[int]]
) -> None:
    result = runtime.run(offloaded(plain, cached_experts=cached, place=where, prefetch=prefetch), H100)
    assert result.outputs == tokens
    assert any(f"moved from the {where}" in note for note in result.provenance.notes)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantized_experts_move_as_they_are_packed(format: str, runtime: Runtime, plain: Scenario) -> None:
    quantized = plain.with_value("techniques", [{"name": "weight_quantization", "format": format}])
    both = [{"name": "weight_quantization", "format": format}, {"name": "expert_offload", "cached_experts": 2}]
    asked = plain.with_value("techniques", both)
    assert runtime.run(asked, H100).outputs == runtime.run(quantized, H100).outputs
    packed, whole = (runtime.decoders.offload(s).caches[0] for s in (asked, _ran(runtime, plain)))
    assert packed.expert_bytes < 0.7 * whole.expert_bytes


def _ran(runtime: Runtime, plain: Scenario) -> Scenario:
    asked = offloaded(plain, cached_experts=EXPERTS, prefetch=False)
    runtime.run(asked, H100)
    return asked


def test_a_cache_of_all_experts_moves_nothing_after_the_first_touch(runtime: Runtime, plain: Scenario) -> None:
    asked = _ran(runtime, plain)
    moves = runtime.decoders.offload(asked).moves
    runtime.run(asked, H100)
    assert moves.hits > 0 and moves.misses <= 3 * EXPERTS
    runtime.run(asked, H100)
    assert moves.misses == moves.bytes == 0 and moves.hit_rate == 1.0


def test_more_room_means_more_hits_and_bytes_are_what_was_missing(runtime: Runtime, plain: Scenario) -> None:
    rates = []
    for cached in (1, 2, 4, 6, EXPERTS):
        asked = offloaded(plain, cached_experts=cached, prefetch=False)
        runtime.run(asked, H100)
        offload = runtime.decoders.offload(asked)
        assert offload.moves.bytes == offload.moves.misses * offload.caches[0].expert_bytes
        assert offload.moves.foreseen == 0 and (offload.moves.stalled_s > 0) == (offload.moves.misses > 0)
        rates.append(offload.moves.hit_rate)
    assert rates == sorted(rates) and rates[0] < 0.5 < rates[-1]


def test_what_is_foreseen_need_not_be_waited_for(runtime: Runtime, plain: Scenario) -> None:
    asked = offloaded(plain, cached_experts=5, prefetch=True)
    runtime.run(asked, H100)
    offload = runtime.decoders.offload(asked)
    ahead = offload.moves
    assert ahead.foreseen > 0
    assert ahead.bytes == (ahead.misses + ahead.foreseen) * offload.caches[0].expert_bytes


def test_each_of_two_processes_keeps_a_cache_of_its_part_of_the_experts(runtime: Runtime, plain: Scenario) -> None:
    """Tokens are those of the same two processes without, and what moves of an expert is half of one device's."""
    halved = plain.with_value("parallel.tp", 2)
    here = runtime.run(halved, H100)
    asked = halved.with_value("techniques", [{"name": "expert_offload", "cached_experts": 2, "prefetch": False}])
    try:
        result = runtime.run(asked, H100)
        moved = runtime.decoders.offload(asked)
        alone = offloaded(plain, cached_experts=2, prefetch=False)
        runtime.run(alone, H100)
        whole = runtime.decoders.offload(alone)
    finally:
        runtime.close()
    assert result.outputs == here.outputs
    assert moved.moves.misses > 0 and moved.moves.bytes == moved.moves.misses * moved.caches[0].expert_bytes
    assert 2 * moved.caches[0].expert_bytes == whole.caches[0].expert_bytes
    assert any("moved from the host" in note for note in result.provenance.notes)


def test_experts_that_are_divided_are_not_put_elsewhere(runtime: Runtime, plain: Scenario) -> None:
    asked = offloaded(plain).with_value("parallel", {"tp": 2, "ep": 2})
    with pytest.raises(MemboundError, match=r"expert_offload of experts that parallel\.ep divides is predicted"):
        runtime.run(asked, H100)


def test_a_model_without_experts_is_refused(runtime: Runtime) -> None:
    chosen = load_scenario("live-cpu").with_value("techniques", [{"name": "expert_offload"}])
    chosen = chosen.with_value("weights", "random")
    with pytest.raises(MemboundError, match="expert_offload moves routed experts, and 'SmolLM2-135M' has none"):
        runtime.run(chosen, H100)


def test_a_full_disk_is_said(
    runtime: Runtime, plain: Scenario, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place.os, "fdatasync", full)
    with pytest.raises(MemboundError, match=r"the experts cannot be kept on the disk of .*: No space left"):
        runtime.run(offloaded(plain, cached_experts=7, place="disk"), H100)


@pytest.mark.parametrize("kind", [HostPlace, DiskPlace])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_a_place_returns_what_it_was_given(kind: type, format: str) -> None:
    kernels, kept = kernels_for("cpu"), kind(CPU)
    weights = [kernels.pack(torch.randn(32, 64, generator=torch.manual_seed(i)).bfloat16(), format) for i in range(3)]
    numbers = [kept.keep(weight) for weight in weights]
    for number, weight in reversed(list(zip(numbers, weights, strict=True))):
        into = buffers_like(weight, CPU)
        kept.read(number, into)
        for name, tensor in tensors_of(weight).items():
            assert torch.equal(tensors_of(into)[name].view(torch.uint8), tensor.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 6),
    steps=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=12),
    guesses=st.lists(st.sets(st.integers(0, 5)), min_size=12, max_size=12),
)
def test_a_cache_gives_every_expert_as_it_is_and_never_holds_more_than_it_may(
    capacity: int, steps: list[set[int]], guesses: list[set[int]]
) -> None:
    kernels = kernels_for("cpu")
    with ThreadPoolExecutor(1) as loader:
        moves = Moves()
        cache = ExpertCache(HostPlace(CPU), capacity, CPU, loader, moves)
        for expert in range(6):
            cache.add(expert, "down", kernels.pack(torch.full((16, 32), float(expert)).bfloat16(), "bf16"))
        for step, guess in zip(steps, guesses, strict=False):
            cache.begin(sorted(step))
            for expert in sorted(step):
                product = kernels.linear(torch.ones(1, 32), cache.weight(expert, "down"))
                assert product.eq(32.0 * expert).all()
                assert len(cache._slots) <= capacity
            cache.foresee(sorted(guess))
    assert moves.hits + moves.misses == sum(map(len, steps))
    assert moves.bytes == (moves.misses + moves.foreseen) * cache.expert_bytes
    if capacity == 6:
        assert moves.misses + moves.foreseen <= 6
