"""After a tree was verified the cache holds what plain decoding would have put there.

Not to the last bit of bf16: attention sums over the guesses of a tree in their order, not in that of the positions.
"""

from __future__ import annotations

import random

import pytest
import torch

from membound.kernels.dispatch import kernels_for
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario.workload import ClosedLoop
from membound.runtime.clock import WallClock
from membound.runtime.decoder import Decoder
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

SIZE, VOCAB, TOKENS = 4, 61, 24


class Oracle:
    """Drafts a random tree in which the true continuation hides among decoys, as deep as it is told."""

    computed_guesses = 0
    reads_hidden = False

    def __init__(self, truth: dict[int, list[int]], seed: int) -> None:
        self.truth = truth
        self.rng = random.Random(seed)

    def draft(self, sequences, rooms):
        return [self._tree(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]

    def _tree(self, sequence, room):
        ahead = self.truth[sequence.id][sequence.emitted : sequence.emitted + room.depth]
        tokens, parents, on_path = [], [], -1
        for _ in range(self.rng.randrange(12)):
            if ahead and self.rng.random() < 0.4:
                tokens.append(ahead.pop(0))
                parents.append(on_path)
                on_path = len(tokens) - 1
            else:
                parent = self.rng.randrange(-1, len(tokens))
                wanted = [tokens[i] for i in range(len(tokens)) if parents[i] == parent] + ahead[:1]
                tokens.append(next(t for t in range(VOCAB) if t not in wanted))
                parents.append(parent)
        return Draft(tuple(tokens), tuple(parents)).first(room.guesses)

    def drawn_from(self, sequence):
        return None

    def observe(self, step, live, normed, paths):
        pass


@pytest.fixture(scope="module")
def decoder(model):
    spec = resolve_model(str(model))
    return Decoder(spec, random_weights(spec, seed=3), kernels_for("cpu", batch_invariant=True), "fp32")


@pytest.mark.parametrize("seed", range(2))
def test_accepted_paths_leave_the_cache_as_plain_decoding_does(decoder, seed):
    rng = random.Random(seed)
    prompts = {i: tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(2, 90))) for i in range(5)}
    truth = {i: list(generate_plain(decoder, prompt, TOKENS)) for i, prompt in prompts.items()}
    tables = BlockTables(300, SIZE)
    scheduler = Scheduler(
        ContinuousBatching(), BlockPool(300, SIZE), 3, 400, drafter=(oracle := Oracle(truth, seed)), tables=tables
    )
    cache = decoder.new_cache(300, SIZE, 3)
    executor = TorchExecutor(decoder, cache, SIZE, GreedySampler(), WallClock(), proposer=oracle)
    checked = Checked(executor, decoder, cache, seed)
    requests = [Request(i, 0.0, len(prompt), TOKENS, prompt) for i, prompt in prompts.items()]
    recorder = Recorder()
    for _ in serve(scheduler, client_for(ClosedLoop(concurrency=3), requests), checked, WallClock(), recorder):
        scheduler.check_integrity()
    assert recorder.outputs == truth
    assert checked.moved > 0 and checked.compared > 0
    assert tables.used == 0


class Checked:
    """Runs steps, and now and then computes a sequence's cache anew, which must be the same."""

    def __init__(self, executor, decoder, cache, seed):
        self.executor, self.decoder, self.cache = executor, decoder, cache
        self.rng = random.Random(seed)
        self.moved = self.compared = 0

    def run(self, step, sequences):
        outcome = self.executor.run(step, sequences)
        for work in step.work:
            if not work.emits or work.parents is None:
                continue
            emitted = outcome.emitted[work.sequence]
            self.moved += len(emitted) > 1
            if self.rng.random() < 0.3:
                self._compare(sequences[work.sequence], [*sequences[work.sequence].token_ids, *emitted[:-1]])
        return outcome

    def _compare(self, sequence, tokens):
        blocks = -(-len(tokens) // SIZE)
        anew = self.decoder.new_cache(blocks, SIZE)
        batch = ragged_batch([Part(0, len(tokens), range(blocks))], SIZE)
        self.decoder.hidden(torch.tensor(tokens), batch, anew)
        for layer, other in zip(self.cache, anew, strict=True):
            for kept, wanted in ((layer.k_blocks, other.k_blocks), (layer.v_blocks, other.v_blocks)):
                held = kept[sequence.blocks[:blocks]].flatten(0, 1)[: len(tokens)]
                torch.testing.assert_close(held, wanted.flatten(0, 1)[: len(tokens)], rtol=2**-6, atol=2**-6)
        self.compared += 1
