"""A workload is complete or refused in one sentence; a task fills what is not given."""

from __future__ import annotations

import pytest

from membound.roofline.scenario import parse_scenario
from membound.roofline.scenario.tasks import acceptance_of, resolve, task_profiles
from membound.roofline.scenario.workload import Workload
from membound.roofline.speculation.acceptance import AcceptanceProfile
from membound.roofline.speculation.by_depth import shares_by_depth
from membound.roofline.techniques import DraftModelSpeculation, Eagle, Medusa, Mtp, NgramSpeculation

# Each kind of drafter as it was when its table was made; chains are as long as the profile says.
TABLED = {
    "ngram": NgramSpeculation(gamma=32),
    "draft_model": DraftModelSpeculation(gamma=32),
    "medusa": Medusa(heads=4, tree_size=63),
    "eagle": Eagle(depth=5, tree_size=25),
    "mtp": Mtp(gamma=16),
}


@pytest.mark.parametrize("name", task_profiles())
def test_each_task_emits_what_its_source_says(name):
    profile = task_profiles()[name]
    assert profile.name == name
    assert set(profile.acceptance) == set(TABLED)
    for kind, technique in TABLED.items():
        given, drafts = profile.acceptance[kind], technique.drafts()
        assert drafts.kind == kind
        chances = given.profile.acceptance_by_position(given.drafts, given.found, shares_by_depth(drafts))
        assert 1 + given.found * chances.sum() == pytest.approx(given.emitted, rel=5e-3)
        assert "assumed" in given.source or "github" in given.source or "Spec-Bench" in given.source
    for source in (profile.prompts_source, profile.output_source, profile.rank_correlation_source):
        assert source.strip()


def workload(**fields) -> Workload:
    arrivals = {"kind": "poisson", "rate_rps": 1.0}
    return Workload.model_validate({"arrivals": arrivals, "requests": 10, **fields})


def test_a_task_fills_what_is_not_given_and_nothing_else():
    task = workload(task="chat", output_tokens={"kind": "fixed", "tokens": 7})
    filled = resolve(task)
    assert filled.output_tokens.tokens == 7
    assert filled.prompts == task_profiles()["chat"].prompts
    assert resolve(workload(task="reasoning")).rank_correlation == task_profiles()["reasoning"].rank_correlation
    assert acceptance_of(task, "ngram") == task_profiles()["chat"].acceptance["ngram"].profile
    own = AcceptanceProfile.constant(0.5)
    assert acceptance_of(workload(task="chat", acceptance=own), "ngram") == own


SYNTHETIC = {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 1, "high": 9}}
OUTPUT = {"kind": "uniform", "low": 1, "high": 9}
SESSIONS = {
    "kind": "sessions",
    "tokens": OUTPUT,
    "turns": {"kind": "fixed", "count": 2},
    "think": {"kind": "fixed", "seconds": 1},
}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompts": SYNTHETIC}, "output_tokens is missing"),
        ({"output_tokens": OUTPUT}, "prompts is missing"),
        ({"prompts": SYNTHETIC, "output_tokens": OUTPUT, "requests": None}, "requests is missing"),
        ({"task": "poetry"}, "field 'workload.task' is 'poetry'"),
        (
            {"prompts": SYNTHETIC, "output_tokens": {"kind": "fixed", "tokens": 4}, "rank_correlation": 0.5},
            "a fixed length follows nothing",
        ),
        (
            {"prompts": {"kind": "text", "file": "live"}, "output_tokens": OUTPUT, "rank_correlation": 0.5},
            "recorded with their own lengths",
        ),
        (
            {
                "prompts": {"kind": "text", "file": "live"},
                "output_tokens": OUTPUT,
                "acceptance": AcceptanceProfile.constant(0.5).model_dump(),
            },
            "acceptance has no effect on recorded text",
        ),
        (
            {
                "task": "chat",
                "acceptance": {
                    "predictable_alpha": 0.1,
                    "predictable_tokens": 2,
                    "surprising_alpha": 0.9,
                    "surprising_tokens": 2,
                },
            },
            r"surprising_alpha is 0.9, above predictable_alpha \(0.1\)",
        ),
        ({"prompts": SESSIONS | {"groups": 3}, "output_tokens": OUTPUT}, "groups is 3 without system_tokens"),
        ({"prompts": SESSIONS | {"popularity": 1}, "output_tokens": OUTPUT}, "popularity is 1.0 with one group"),
        ({"arrivals": {"kind": "mmpp", "states": [{"rate_rps": 0, "dwell_s": 1}] * 2}}, "nothing would arrive"),
        ({"arrivals": {"kind": "mmpp", "states": [{"rate_rps": 1, "dwell_s": 1e-3}] * 2}}, "Poisson at the mean rate"),
        ({"arrivals": {"kind": "hourly", "rates_rps": [0, 0]}}, "nothing would arrive"),
        ({"output_tokens": {"kind": "quantiles", "shares": [0, 0.5], "tokens": [1, 2]}}, "rise from 0 to 1"),
        ({"output_tokens": {"kind": "quantiles", "shares": [0, 1], "tokens": [9, 2]}}, "tokens must not fall"),
        ({"output_tokens": {"kind": "histogram", "edges": [1, 2], "counts": [0]}}, "counts are all zero"),
        ({"output_tokens": {"kind": "histogram", "edges": [1, 2], "counts": [1, 1]}}, "give one fewer"),
    ],
)
def test_what_cannot_be_or_would_change_nothing_is_refused_in_one_sentence(fields, sentence):
    document = {"arrivals": {"kind": "poisson", "rate_rps": 1.0}, "requests": 10, **fields}
    with pytest.raises(ValueError, match=sentence) as caught:
        parse_scenario({"name": "bad", "model": "m", "workload": document})
    assert "\n" not in str(caught.value)
