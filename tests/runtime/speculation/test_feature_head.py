"""What the layer predicts along a path of a tree is what one pass over the whole path predicts."""

from __future__ import annotations

import pytest
import torch

from membound.kernels.dispatch import kernels_for
from membound.roofline.models.files import resolve_model
from membound.runtime.loading.weights import random_weights
from membound.runtime.ragged import Part, ragged_batch
from membound.runtime.speculation.eagle import EagleProposer, FeatureHead
from membound.runtime.speculation.heads import random_head
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.request import Request, Sequence, Step, Work

SIZE, PROMPT, DEPTH, GUESSES = 4, 9, 4, 16


class Watched(EagleProposer):
    """Keeps the trees that it grows."""

    def _add(self, growing, parents, states):
        super()._add(growing, parents, states)
        self.growing = growing


def decoding(id: int, tokens: list[int], blocks: list[int]) -> Sequence:
    sequence = Sequence(Request(id, 0.0, len(tokens) - 1, 20), list(tokens))
    sequence.standing, sequence.standing_computed, sequence.blocks = len(tokens), len(tokens) - 1, blocks
    return sequence


@pytest.mark.parametrize("guesses", [DEPTH, GUESSES], ids=["chain", "tree"])
def test_a_path_is_continued_as_in_one_pass(model, guesses):
    spec = resolve_model(str(model))
    kernels = kernels_for("cpu", batch_invariant=True)
    head = FeatureHead(random_head("eagle", spec, 1, 61, seed=2), spec, random_weights(spec, seed=1), kernels)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(61, (PROMPT + i + 1,), generator=generator).tolist() for i in range(2)]
    states = [torch.randn(len(tokens) - 1, spec.hidden, generator=generator) for tokens in prompts]
    sequences = [decoding(i, tokens, list(range(20 * i, 20 * i + 20))) for i, tokens in enumerate(prompts)]

    proposer = Watched(head, 40, SIZE, DEPTH, guesses, guesses // DEPTH)
    work = tuple(Work(seq.id, 0, seq.computed) for seq in sequences)
    step = Step(0, 0, work, work, (), (), (), 0, 0, 0, 0, 40, 1, ())
    proposer.observe(step, {0, 1}, torch.cat(states), {0: (), 1: ()})
    drafts = proposer.draft(sequences, [Room(DEPTH, 60)] * 2)
    assert all(len(draft.tokens) == guesses for draft in drafts)
    if guesses > DEPTH:  # few are continued, but each by as many tokens as are likely
        assert max(sum(parent < 0 for parent in draft.parents) for draft in drafts) > guesses // DEPTH

    for one, true in zip(proposer.growing, states, strict=True):
        tokens = one.sequence.token_ids
        assert len(one.states) > DEPTH - 2
        for guess, found in one.states.items():
            path = []
            while guess >= 0:
                path.insert(0, guess)
                guess = one.guesses[guess].parent
            pairs = torch.cat([true, *(one.states[one.guesses[index].parent][None] for index in path)])
            behind = [*tokens[1:], *(one.guesses[index].token for index in path)]
            batch = ragged_batch([Part(0, len(behind), range(20))], SIZE)
            anew = head(pairs, torch.tensor(behind), batch, head.new_cache(20, SIZE)).normed[-1]
            torch.testing.assert_close(found, anew, rtol=2e-2, atol=2e-2)


def test_a_draft_is_a_tree_of_the_likeliest_guesses_in_order(model):
    from membound.runtime.speculation.trees import Guess, best_draft, independent_draft

    guesses = [Guess(5, 0.6, -1), Guess(6, 0.3, -1), Guess(7, 0.5, 0), Guess(8, 0.05, 0), Guess(9, 0.3, 1)]
    draft = best_draft(guesses, 4)
    assert draft.tokens == (5, 7, 6, 9) and draft.parents == (-1, 0, -1, 2)
    ranked = [[(5, 0.6), (6, 0.3)], [(7, 0.9), (8, 0.1)]]
    draft = independent_draft(ranked, 4)
    assert draft.tokens == (5, 7, 6, 7) and draft.parents == (-1, 0, -1, 2)
