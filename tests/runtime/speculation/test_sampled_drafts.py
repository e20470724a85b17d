"""Sampled speculation draws from the model's own distribution, whatever was drafted and however it was drawn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from membound.kernels.dispatch import kernels_for
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.scenario import load_scenario
from membound.runtime.sampling import Guesses, TemperatureSampler, TypicalSampler
from membound.runtime.speculation.build import DraftHost, proposer_for, sampler_of
from membound.simulator.scheduling.drafter import Room
from membound.simulator.scheduling.request import Request, Sequence

TRIALS = 2000
# Rows: after the newest token, and after each of four guesses; four tokens.
LOGITS = torch.tensor(
    [[0.5, 1.5, -0.5, 1.0], [0.0, 1.0, 0.3, -1.0], [2.0, 0.0, 0.1, 0.2], [0.4, 0.4, 0.1, 1.4], [1.0, 0.0, 0.0, 2.0]]
)
Q = torch.tensor([0.4, 0.3, 0.2, 0.1])


def drawn_tree(generator: torch.Generator) -> Guesses:
    """Three guesses of the next token, drawn from Q without replacement."""
    tokens, rows, q = [], [], Q.clone()
    for _ in range(3):
        rows.append(q / q.sum())
        tokens.append(int(torch.multinomial(rows[-1], 1, generator=generator)))
        q = q.clone()
        q[tokens[-1]] = 0
    return Guesses(tuple(tokens), (-1, -1, -1), torch.stack(rows))


def drawn_chain(generator: torch.Generator) -> Guesses:
    token = int(torch.multinomial(Q, 1, generator=generator))
    return Guesses((token,), None, Q[None])


def certain_tree(generator: torch.Generator) -> Guesses:
    return Guesses((2, 0, 1), (-1, -1, 1))


@pytest.mark.parametrize("draft", [drawn_chain, drawn_tree, certain_tree])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_first_token_is_distributed_as_without_guesses(draft, temperature):
    generator = torch.Generator().manual_seed(1)
    sampler = TemperatureSampler(temperature, seed=2)
    counts = np.zeros(4)
    for _ in range(TRIALS):
        guesses = draft(generator)
        (found,) = sampler.verify(LOGITS[: guesses.rows], [guesses])
        counts[found.tokens[0]] += 1
    expected = torch.softmax(LOGITS[0].double() / temperature, dim=-1).numpy() * TRIALS
    assert chisquare(counts, expected).pvalue > 1e-4


def test_what_follows_an_accepted_guess_is_distributed_by_its_own_row():
    """Of the certain tree guess 1 (token 0) leads to row 2."""
    sampler = TemperatureSampler(1.0, seed=4)
    guesses = certain_tree(torch.Generator())
    second = np.zeros(4)
    for _ in range(TRIALS):
        (found,) = sampler.verify(LOGITS[:4], [guesses])
        if found.path[:1] == (1,):
            second[found.tokens[1]] += 1
            assert (found.path == (1, 2)) == (found.tokens[1] == 1)
    expected = torch.softmax(LOGITS[2].double(), dim=-1).numpy() * second.sum()
    assert chisquare(second, expected).pvalue > 1e-4


def test_a_guess_of_the_models_own_distribution_is_always_accepted():
    p = torch.softmax(LOGITS[0], dim=-1)
    sampler = TemperatureSampler(1.0, seed=5)
    for token in range(4):
        ((_, path),) = sampler.verify(LOGITS[:2], [Guesses((token,), None, p[None])])
        assert path == (0,)


def test_the_share_of_accepted_guesses_is_one_minus_the_total_variation():
    """Leviathan et al., ICML 2023, theorem 3.5."""
    generator, sampler = torch.Generator().manual_seed(6), TemperatureSampler(1.0, seed=7)
    accepted = sum(len(sampler.verify(LOGITS[:2], [drawn_chain(generator)])[0].path) for _ in range(TRIALS))
    overlap = float(torch.minimum(torch.softmax(LOGITS[0], dim=-1), Q).sum())
    assert accepted / TRIALS == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / TRIALS) ** 0.5)


def test_typical_acceptance_takes_the_longest_path_of_likely_guesses():
    logits = torch.log(torch.tensor([[0.6, 0.4, 1e-9], [0.5, 0.5, 1e-9], [0.9, 0.05, 0.05], [0.2, 0.2, 0.6]]))
    sampler = TypicalSampler(1.0, seed=1)
    ((tokens, path),) = sampler.verify(logits, [Guesses((2, 1, 0), (-1, -1, 1))])
    assert path == (1, 2) and tokens[:2] == (1, 0)
    for _ in range(20):  # the model alone would often draw the other token
        assert sampler.verify(logits[:2], [Guesses((1,))])[0].path == (0,)


@pytest.mark.parametrize(
    "fields",
    [{"name": "self_speculation", "layers": 3, "gamma": 2}, {"name": "eagle", "depth": 2, "tree_size": 8}],
    ids=["chain", "tree"],
)
def test_a_served_run_writes_tokens_as_often_as_without_drafts(runtime, scenario_of, fields):
    """Which of the tiny model's tokens comes second in many runs of one prompt, with drafts and without."""
    counts = []
    for techniques in ((), (fields,)):
        found = np.zeros(61)
        chosen = scenario_of(*techniques, batch=16, temperature=0.3, engine={"num_blocks": 2000})
        chosen = chosen.with_value("workload.requests", 60).with_value("workload.arrivals.concurrency", 16)
        chosen = chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 4})
        for tokens in runtime.run(chosen, get_hardware("H100-SXM5")).outputs.values():
            np.add.at(found, tokens[1:], 1)
        counts.append(found)
    table = np.array(counts)
    often = table[:, table.sum(axis=0) >= 20]
    rest = table[:, table.sum(axis=0) < 20].sum(axis=1, keepdims=True)
    assert chi2_contingency(np.hstack([often, rest + 1])).pvalue > 1e-4


class Bigrams:
    """In place of a decoder: the logits of the next token follow from the last."""

    device, spec = torch.device("cpu"), get_model("SmolLM2-135M")

    def __init__(self, logits: torch.Tensor) -> None:
        self.table = logits

    def hidden(self, token_ids, batch, cache, layers):
        return SimpleNamespace(normed=token_ids)

    def logits(self, normed):
        return self.table[normed]


def test_three_tokens_of_a_run_are_drawn_jointly_as_the_model_draws_them():
    """Leviathan et al., ICML 2023, appendix A.1, which needs a verifier that does not draw with the drafter's numbers.

    The drafter and the sampler are those of the product, built anew for the seed of each run.
    """
    generator = torch.Generator().manual_seed(0)
    model, drafter = (0.7 * torch.randn(3, 3, generator=generator) for _ in range(2))
    drafts = {"name": "self_speculation", "layers": 3, "gamma": 2}
    scenario = load_scenario("live-cpu").with_value("techniques", ["continuous_batching", drafts])
    scenario = scenario.with_value("temperature", 1.0)
    host = DraftHost(Bigrams(drafter), None, [SimpleNamespace(move_tokens=None)], 1, 16, None)
    kernels, found = kernels_for("cpu"), np.zeros((3, 3, 3))
    for seed in range(1500):
        run = scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"seed": seed})})
        proposer, sampler = proposer_for(run, host), sampler_of(run, "cpu", kernels)
        tokens = [0]
        while len(tokens) < 4:
            sequence = Sequence(Request(0, 0.0, len(tokens), 3), tokens)
            sequence.standing_computed, sequence.blocks = len(tokens) - 1, [0]
            (guessed,) = proposer.draft([sequence], [Room(2, 2)])
            rows = model[torch.tensor([tokens[-1], *guessed.tokens])]
            (verified,) = sampler.verify(rows, [Guesses(guessed.tokens, None, proposer.drawn_from(0))])
            tokens += verified.tokens
        found[tuple(tokens[1:4])] += 1
    p = torch.softmax(model.double(), dim=-1).numpy()
    expected = p[0][:, None, None] * p[:, :, None] * p[None] * found.sum()
    assert chisquare(found.ravel(), expected.ravel()).pvalue > 1e-4
