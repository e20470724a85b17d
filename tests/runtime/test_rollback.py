"""Guesses that were rejected leave no trace in recurrent states: tokens and states are those of plain decoding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from membound.kernels.dispatch import kernels_for
from membound.kernels.reference import TorchKernels
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models import ModelSpec
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.scenario.workload import ClosedLoop
from membound.runtime.blocks.states import SeatStates
from membound.runtime.clock import WallClock
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.executor import TorchExecutor
from membound.runtime.loading.weights import random_weights
from membound.runtime.plain import generate_plain
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.sampling import GreedySampler
from membound.simulator.scheduling.blocks import BlockPool, BlockTables
from membound.simulator.scheduling.client import client_for
from membound.simulator.scheduling.loop import serve
from membound.simulator.scheduling.policies import ContinuousBatching
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.request import Draft, Request
from membound.simulator.scheduling.scheduler import Scheduler

SIZE, VOCAB, TOKENS = 4, 64, 20
_TINY: dict[str, Any] = {
    "name": "tiny",
    "layers": 3,
    "hidden": 32,
    "vocab": VOCAB,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8},
    "ffn": {"kind": "gated", "intermediate": 48},
    "tie_embeddings": True,
    "max_context": 256,
    "source": "a test",
}
_MAMBA2 = {"kind": "mamba2", "heads": 4, "head_dim": 16, "d_state": 8, "groups": 2}
_CHANNEL_MIX = {"kind": "channel_mix", "intermediate": 48, "receptance": False}
_RANKS = dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), 4)
_DELTA = {"kind": "gated_delta_net", "key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 12}
KINDS: dict[str, dict[str, Any]] = {
    "Mamba-2": {"attention": _MAMBA2},
    "Mamba": {"attention": {"kind": "mamba1", "d_inner": 64, "d_state": 8, "dt_rank": 4, "inner_norms": True}},
    "RWKV-6": {
        "attention": {"kind": "rwkv6", "heads": 2, "head_dim": 16, "shift_rank": 4, "decay_rank": 6},
        "ffn": _CHANNEL_MIX | {"receptance": True},
        "norm": "layer",
    },
    "RWKV-7": {
        "attention": {"kind": "rwkv7", "heads": 2, "head_dim": 16, **_RANKS},
        "ffn": _CHANNEL_MIX,
        "norm": "layer",
        "embedding_norm": True,
    },
    "gated DeltaNet": {"attention": _DELTA},
    "beside attention": {"overrides": [{"layers": "1::2", "attention": _MAMBA2}]},
}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


class Oracle:
    """Drafts up to four tokens, of which so many as it likes are right."""

    computed_guesses = 0
    reads_hidden = False

    def __init__(self, truth: dict[int, list[int]], seed: int) -> None:
        self.truth = truth
        self.rng = random.Random(seed)

    def draft(self, sequences, rooms):
        return [self._chain(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]

    def _chain(self, sequence, room):
        ahead = self.truth[sequence.id][sequence.emitted : sequence.emitted + min(4, room.chain)]
        ahead = ahead[: self.rng.randrange(len(ahead) + 1)]
        right = self.rng.randrange(len(ahead) + 1)
        return Draft(tuple(ahead[:right] + [(token + 1) % VOCAB for token in ahead[right:]]))

    def drawn_from(self, sequence):
        return None

    def observe(self, step, live, normed, paths):
        pass


def decoder_of(kind: str, kernels: Any) -> Decoder:
    spec = ModelSpec(**_TINY | KINDS.get(kind, {}))
    return Decoder(spec, random_weights(spec, 3), kernels, "fp32")


@pytest.mark.parametrize("blocks", [200, 20])
@pytest.mark.parametrize("kind", [*KINDS, "attention alone"])
def test_tokens_and_states_are_those_of_plain_decoding(kind: str, blocks: int) -> None:
    """With few blocks sequences are preempted, and begin anew. Only states read accepted tokens a second time."""
    decoder, rng = decoder_of(kind, ExactKernels()), random.Random(1)
    prompts = {i: tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(2, 30))) for i in range(5)}
    truth = {i: list(generate_plain(decoder, prompt, TOKENS)) for i, prompt in prompts.items()}
    tables, oracle = BlockTables(blocks, SIZE), Oracle(truth, 2)
    scheduler = Scheduler(ContinuousBatching(), BlockPool(blocks, SIZE), 3, 400, drafter=oracle, tables=tables)
    cache = decoder.new_cache(blocks, SIZE, 3)
    executor = TorchExecutor(decoder, cache, SIZE, GreedySampler(), WallClock(), proposer=oracle)
    requests = [Request(i, 0.0, len(prompt), TOKENS, prompt) for i, prompt in prompts.items()]
    recorder = Recorder()
    client = client_for(ClosedLoop(concurrency=3), requests)
    for _ in serve(scheduler, client, Checked(executor, decoder, cache), WallClock(), recorder):
        scheduler.check_integrity()
    assert recorder.outputs == truth
    assert (executor.rollback.read_again > 0) == (kind in KINDS)


class Checked:
    """Runs steps; after each, states are those of the tokens that they have seen."""

    def __init__(self, executor: TorchExecutor, decoder: Decoder, cache: Any) -> None:
        self.executor, self.decoder, self.cache = executor, decoder, cache

    def run(self, step, sequences):
        outcome = self.executor.run(step, sequences)
        for work in step.work[:1]:
            if not work.drafts:
                continue
            emitted = outcome.emitted[work.sequence]
            rejected = len(emitted) - 1 < len(work.drafts)
            seen = [*sequences[work.sequence].token_ids[: work.context - len(work.drafts)]]
            self._compare(self.executor.seats.of[work.sequence], seen if rejected else [*seen, *emitted[:-1]])
        return outcome

    def _compare(self, seat: int, seen: list[int]) -> None:
        blocks = -(-len(seen) // SIZE)
        anew = self.decoder.new_cache(blocks, SIZE)
        self.decoder.hidden(torch.tensor(seen), ragged_batch([Part(0, len(seen), range(blocks))], SIZE), anew)
        for layer, other in zip(self.cache, anew, strict=True):
            if isinstance(layer, SeatStates):
                for name, part in layer.parts.items():
                    torch.testing.assert_close(part[seat], other.parts[name][0], rtol=1e-4, atol=1e-5)


def scenario_of(tmp_path: Path, kind: str, *techniques: Any) -> Scenario:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(_TINY | KINDS[kind]))
    return parse_scenario(
        {
            "name": "states",
            "model": str(path),
            "hardware": "A100-SXM4-80GB",
            "engine": {"max_num_seqs": 4, "block_size": 16},
            "techniques": ["continuous_batching", *techniques],
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 4},
                "requests": 6,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 10, "high": 60}},
                "output_tokens": {"kind": "fixed", "tokens": 40},
            },
        }
    )


@pytest.mark.parametrize("kind", ["Mamba-2", "beside attention"])
def test_the_engine_drafts_for_a_recurrent_model(kind: str, tmp_path: Path) -> None:
    runtime, hardware = Runtime("cpu", kernels=kernels_for("cpu", batch_invariant=True)), get_hardware("A100-SXM4-80GB")
    plain = runtime.run(scenario_of(tmp_path, kind), hardware)
    drafted = runtime.run(scenario_of(tmp_path, kind, {"name": "ngram_speculation", "min_ngram": 1}), hardware)
    assert drafted.outputs == plain.outputs
    assert drafted.steps["drafted"].sum() > 0


@pytest.mark.parametrize(
    ("technique", "sentence"),
    [
        ({"name": "medusa", "tree_size": 8}, "medusa drafts are trees, or read what the model computes: take ngram_"),
        ({"name": "self_speculation", "layers": 1}, "self drafts are trees, or read what the model computes"),
        ({"name": "draft_model_speculation", "format": "int8"}, "keeps a recurrent state, from which what it wrote"),
    ],
)
def test_a_drafter_that_states_do_not_allow_is_refused_in_one_sentence(
    technique: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    if technique["name"] == "draft_model_speculation":
        technique = technique | {"draft": str(tmp_path / "model.yaml")}
    with pytest.raises(MemboundError, match=sentence):
        Runtime("cpu").run(scenario_of(tmp_path, "Mamba-2", technique), get_hardware("A100-SXM4-80GB"))
