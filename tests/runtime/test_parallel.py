"""A model that several processes hold is the model: its parts are the whole, and its tokens are the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.dispatch import kernels_for
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import ModelSpec, get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import Scenario, load_scenario
from membound.runtime.clock import WallClock
from membound.runtime.decoder import KvCache
from membound.runtime.engine import Runtime
from membound.runtime.executor import TorchExecutor
from membound.runtime.loading.weights import Weights, random_weights
from membound.runtime.parallel.group import GroupError
from membound.runtime.parallel.leader import DividedCache, DividedDecoder
from membound.runtime.parallel.shards import Share, shard_spec, shard_weights
from membound.runtime.plain import generate_plain
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.sampling import GreedySampler
from membound.simulator.scheduling.request import Request, Work
from membound.simulator.scheduling.request import Sequence as RequestSequence


def scenario_of(folder: Path, tp: int, exact: bool = False) -> Scenario:
    return load_scenario("live-cpu").model_copy(
        update={
            "model": str(folder / "config.json"),
            "weights": str(folder),
            "parallel": Parallelism(tp=tp, exact=exact),
            "workload": load_scenario("million-requests").workload.model_copy(update={"requests": 1}),
            "techniques": (),
            "sweep": (),
        }
    )


class OnMeta:
    """A part on a device from which nothing comes back to the host."""

    device = torch.device("meta")
    kernels = None

    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: KvCache, logits_rows: Tensor) -> Tensor:
        assert {t.device.type for t in (token_ids, batch.positions, batch.block_table, logits_rows)} == {"meta"}
        return torch.ones(len(logits_rows), 5)


class Told:
    """A group and its followers, who are all there."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []

    def reason(self) -> None:
        return None

    def broadcast(self, x: Tensor) -> Tensor:
        self.messages.append(x)
        return x


def test_a_step_is_told_to_the_others_before_its_inputs_go_to_the_device() -> None:
    told = Told()
    decoder = DividedDecoder(get_model("Llama-3.2-1B"), OnMeta(), told, told)  # type: ignore[arg-type]
    executor = TorchExecutor(decoder, DividedCache([], 1), 16, GreedySampler(), WallClock())
    sequence = RequestSequence(Request(0, 0.0, 3, 2, (7, 8, 9)), [7, 8, 9])
    sequence.blocks = [4]
    executor.seats.of[0] = 0
    normed, logits = executor._computed((Work(0, 0, 3),), {0: sequence})
    assert normed is None and logits.shape == (1, 5)
    assert told.messages[1][:3].tolist() == [7, 8, 9] and told.messages[1][6:9].tolist() == [64, 65, 66]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_parts_have_the_shapes_of_the_roofline_and_are_the_whole(tp: int) -> None:
    spec = get_model("Llama-3.2-1B").model_copy(update={"layers": 1, "vocab": 64})
    weights = random_weights(spec, seed=0)
    part_spec = shard_spec(spec, Parallelism(tp=tp))
    parts = [shard_weights(spec, weights, Share(rank, Parallelism(tp=tp))) for rank in range(tp)]
    expected = spec.attention.linears(spec.hidden, tp) + spec.ffn.linears(spec.hidden, tp)
    for part in parts:
        assert {(name, *part.layers[0][name].shape) for name, _, _ in expected} == {tuple(shape) for shape in expected}
    assert part_spec.layer_linears() == expected
    whole = weights.layers[0]
    for name in ("qkv", "o", "gate_up", "down"):
        assert sum(part.layers[0][name].numel() for part in parts) == whole[name].numel()
        sums = sum(part.layers[0][name].double().sum() for part in parts)
        torch.testing.assert_close(sums, whole[name].double().sum())
    x = torch.randn(3, spec.hidden)
    products = torch.cat([x @ part.lm_head.float().T for part in parts], dim=-1)
    torch.testing.assert_close(products, x @ weights.lm_head.float().T)


@pytest.mark.parametrize(
    ("model", "tp", "said"),
    [
        ("SmolLM2-135M", 2, "attention.heads of SmolLM2-135M is 9"),
        ("Llama-3.2-1B", 16, "attention.kv_heads of Llama-3.2-1B is 8"),
        ("Mamba-2.8B", 2, "Mamba-2.8B has others"),
    ],
)
def test_what_does_not_divide_is_refused_in_one_sentence(model: str, tp: int, said: str) -> None:
    with pytest.raises(MemboundError, match=said):
        shard_spec(get_model(model), Parallelism(tp=tp))


@pytest.mark.parametrize("name", ["tiny_qwen2", "tiny_llama3"])
def test_two_processes_write_the_tokens_of_one(name: str, reference: Path) -> None:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    prompts = [[5, 9, 2, 7], list(range(40, 70)), [3]]
    alone = runtime.decoder(scenario_of(reference / name, 1))
    together = runtime.decoders.engine_decoder(scenario_of(reference / name, 2))
    for prompt in prompts:
        assert list(generate_plain(together, prompt, 12)) == list(generate_plain(alone, prompt, 12))
    assert together.weight_bytes < 0.7 * alone.weight_bytes
    followers = together.followers
    runtime.close()
    assert not followers.alive and torch.get_num_threads() >= 1


@pytest.mark.parametrize("name", ["tiny_qwen2", "tiny_llama3"])
def test_an_exact_division_gives_the_bits_of_one(name: str, reference: Path) -> None:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    alone = runtime.decoder(scenario_of(reference / name, 1))
    together = runtime.decoders.engine_decoder(scenario_of(reference / name, 2, exact=True))
    batch, ids = ragged_batch([Part(0, 20, range(2))], 16), torch.arange(3, 23)
    rows = torch.arange(20)
    expected = alone.forward(ids, batch, alone.new_cache(2, 16), rows)
    assert torch.equal(together.forward(ids, batch, together.new_cache(2, 16), rows), expected)
    assert together.weight_bytes < 0.7 * alone.weight_bytes
    runtime.close()


def test_an_exact_division_of_a_mixture_is_refused() -> None:
    with pytest.raises(MemboundError, match=r"parallel\.exact is true, but .*Mixtral.* sums its experts"):
        shard_spec(get_model("Mixtral-8x7B"), Parallelism(tp=2, exact=True))


def test_three_processes_serve_real_weights_as_one_does(smollm2: tuple[ModelSpec, Weights]) -> None:
    """SmolLM2 has three KV heads, so that three processes hold it."""
    chosen = load_scenario("live-cpu").with_techniques(()).with_value("workload.requests", 6)
    chosen = chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 12})
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    h100 = get_hardware("H100-SXM5")
    plain = runtime.run(chosen, h100)
    divided = runtime.run(chosen.model_copy(update={"parallel": Parallelism(tp=3)}), h100)
    runtime.close()
    assert divided.outputs == plain.outputs


def test_a_killed_process_is_said_in_one_sentence_and_the_next_run_has_a_new_one(reference: Path) -> None:
    runtime = Runtime(kernels=kernels_for("cpu", batch_invariant=True))
    chosen = scenario_of(reference / "tiny_llama3", 2)
    decoder = runtime.decoders.engine_decoder(chosen)
    expected = list(generate_plain(decoder, [4, 5, 6], 4))
    os.kill(decoder.followers.processes[0].pid, signal.SIGKILL)
    decoder.followers.processes[0].wait()
    with pytest.raises(GroupError, match="process 1 of the divided model ended by SIGKILL"):
        list(generate_plain(decoder, [4, 5, 6], 4))
    assert list(generate_plain(runtime.decoders.engine_decoder(chosen), [4, 5, 6], 4)) == expected
    runtime.close()
