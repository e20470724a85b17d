"""A simulated run obeys the laws of queues and of the roofline."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.speculation.steps import speculation_of
from membound.roofline.techniques import (
    ContinuousBatching,
    DraftModelSpeculation,
    Eagle,
    Int8Weights,
    Medusa,
    NgramSpeculation,
)
from membound.simulator import run as runs
from membound.simulator.run import run


def scenario(**changes) -> Scenario:
    document = {
        "name": "laws",
        "model": "Llama-3.1-8B",
        "hardware": "H100-SXM5",
        "engine": {"max_num_seqs": 8},
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": 8},
            "requests": 40,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "lognormal", "median": 100, "sigma": 0.5, "high": 500}},
            "output_tokens": {"kind": "uniform", "low": 8, "high": 64},
            "seed": 3,
        },
    }
    return parse_scenario(document | changes)


def poisson(rate_rps: float) -> Scenario:
    base = scenario().model_dump(mode="json")
    base["workload"]["arrivals"] = {"kind": "poisson", "rate_rps": rate_rps}
    return parse_scenario(base).with_techniques((ContinuousBatching(),))


@pytest.mark.parametrize("techniques", [(), (ContinuousBatching(),), (ContinuousBatching(), NgramSpeculation())])
def test_requests_and_tokens_are_conserved(techniques):
    result = run(scenario().with_techniques(techniques))
    summary = result.summary
    assert summary.completed == summary.requests == 40
    assert result.requests["output_tokens"].sum() == result.steps["emitted"].sum()
    assert sum(summary.bottleneck_share.values()) == pytest.approx(1)
    order = ("arrival_s", "admitted_s", "first_token_s", "finished_s")
    for before, after in itertools.pairwise(order):
        assert np.all(result.requests[before] <= result.requests[after])
    assert np.all(np.diff(result.steps["start_s"]) > 0)


def test_the_same_scenario_gives_the_same_records():
    first, second = run(poisson(20.0)), run(poisson(20.0))
    assert first.summary == second.summary
    for name, column in first.requests.items():
        np.testing.assert_array_equal(column, second.requests[name])


def test_continuous_batching_is_never_slower_than_static_batching():
    static, continuous = run(scenario()), run(scenario().with_techniques((ContinuousBatching(),)))
    assert continuous.summary.output_tokens_per_s > static.summary.output_tokens_per_s


def test_at_a_concurrency_of_one_batching_policies_agree():
    alone = scenario().with_value("workload.arrivals.concurrency", 1)
    assert run(alone).summary == run(alone.with_techniques((ContinuousBatching(),))).summary


def test_int8_gains_at_most_the_ratio_of_the_bytes():
    alone = scenario().with_value("workload.arrivals.concurrency", 1)
    before, after = run(alone), run(alone.with_techniques((Int8Weights(),)))
    gain = before.summary.tpot_s.mean / after.summary.tpot_s.mean
    assert 1.0 < gain < 2.0


@pytest.mark.parametrize(
    "technique",
    [
        Eagle(depth=5, tree_size=8),
        Eagle(depth=6, tree_size=60),
        Medusa(heads=3, tree_size=12),
        NgramSpeculation(gamma=6),
        DraftModelSpeculation(gamma=3),
    ],
    ids=lambda technique: technique.name,
)
@pytest.mark.parametrize("task", ["chat", None])
def test_a_run_accepts_what_the_closed_form_says_of_this_drafter_and_tree(technique, task):
    """Over some 12,000 steps of a sequence; their standard error is below 1 %."""
    asked = scenario().with_techniques((ContinuousBatching(), technique)).with_value("workload.task", task)
    asked = asked.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 1000})
    steps, speculation = run(asked).steps, speculation_of(asked)
    decoding = ((steps["sequences"] - steps["prefill_sequences"]) * steps["steps"]).sum()
    assert 1 + steps["accepted"].sum() / decoding == pytest.approx(speculation.expected_tokens, rel=0.03)


def test_a_trace_of_more_requests_than_records_are_kept_of_is_refused_in_a_sentence(tmp_path, monkeypatch):
    rows = tmp_path / "rows.csv"
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{i},10,2" for i in range(500))]
    rows.write_text("\n".join(lines), "utf-8")
    asked = scenario().with_value("workload", {"arrivals": {"kind": "trace", "file": str(rows)}})
    monkeypatch.setattr(runs, "MOST_RECORDED", 600)
    assert run(asked).summary.completed == 500
    monkeypatch.setattr(runs, "MOST_RECORDED", 400)
    with pytest.raises(
        MemboundError, match=r"about 500 rows, and a run keeps records of 400 .* give workload.requests"
    ):
        run(asked)
    assert run(asked.with_value("workload.requests", 20)).summary.completed == 20


def test_speculation_without_acceptance_is_a_loss_and_with_full_acceptance_a_gain():
    alone = scenario().with_value("workload.arrivals.concurrency", 1)
    plain = run(alone).summary.tpot_s.mean
    none = run(alone.with_techniques((NgramSpeculation(hit_rate=1, alpha=0),)))
    full = run(alone.with_techniques((NgramSpeculation(hit_rate=1, alpha=1, gamma=4),)))
    assert none.summary.tpot_s.mean > plain > full.summary.tpot_s.mean
    assert none.summary.acceptance_rate == 0 and full.summary.acceptance_rate == 1


def test_modelled_acceptance_emits_the_expected_tokens_for_each_draft():
    """E = (1 - alpha^(gamma + 1)) / (1 - alpha), Leviathan et al., ICML 2023, equation 1."""
    alpha, gamma = 0.7, 3
    workload = scenario().with_value("workload.output_tokens", {"kind": "fixed", "tokens": 400})
    result = run(workload.with_techniques((NgramSpeculation(hit_rate=1, alpha=alpha, gamma=gamma),)))
    drafted = result.steps["drafted"] == gamma * result.steps["sequences"]
    per_sequence = result.steps["emitted"][drafted].sum() / result.steps["sequences"][drafted].sum()
    assert per_sequence == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=0.03)


def test_waiting_grows_with_load_and_idleness_falls():
    slow, fast = run(poisson(1.0)), run(poisson(200.0))
    assert slow.summary.ttft_s.mean < fast.summary.ttft_s.mean
    assert slow.summary.bottleneck_share["idle"] > 0.5 > fast.summary.bottleneck_share["idle"]


def test_at_low_load_a_request_meets_an_empty_engine():
    result = run(poisson(2e-4))
    prompts = result.steps["prefill_tokens"] > 0
    assert np.all(result.steps["sequences"][prompts] == 1)
    np.testing.assert_allclose(
        result.requests["first_token_s"] - result.requests["arrival_s"], result.steps["time_s"][prompts], rtol=1e-9
    )


def test_littles_law_holds():
    """Mean number in the system = throughput x mean time in it (Little, 1961)."""
    result = run(poisson(50.0))
    in_system = result.requests["finished_s"] - result.requests["arrival_s"]
    first = result.requests["arrival_s"].min()
    window = result.summary.duration_s - first
    times = np.linspace(first, result.summary.duration_s, 20_001)
    counted = [np.sum((result.requests["arrival_s"] <= t) & (t < result.requests["finished_s"])) for t in times]
    assert np.mean(counted) == pytest.approx(len(in_system) / window * in_system.mean(), rel=0.01)


def test_few_blocks_preempt_and_still_answer_everybody():
    tight = scenario(engine={"max_num_seqs": 8, "num_blocks": 60}).with_techniques((ContinuousBatching(),))
    result = run(tight)
    assert result.summary.preemptions > 0
    assert result.summary.completed == 40


def test_a_run_in_which_every_request_is_rejected_has_a_summary():
    summary = run(scenario(engine={"num_blocks": 1})).summary
    assert summary.rejected == summary.requests == 40 and summary.completed == 0
    assert summary.duration_s == 0 and summary.tpot_s.mean is None and summary.bottleneck_share["idle"] == 1


def test_a_model_that_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(MemboundError, match=r"does not fit: its weights take .* GiB of 'L4'"):
        run(scenario(model="Llama-3.1-70B", hardware="L4"))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("hardware", "H1000", "hardware 'H1000' is unknown"),
        ("model", "Lama-3.1-8B", "did you mean Llama-3.1-8B"),
        ("workload.prompts", {"kind": "text", "file": "nowhere"}, "'nowhere' cannot be read"),
    ],
)
def test_unknown_names_are_refused_in_one_sentence(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(scenario().with_value(field, value))


def test_a_note_says_how_many_waited_for_a_seat_and_only_where_seats_bind():
    def said(clients: int, **engine: int) -> list[str]:
        loop = scenario(engine=engine).with_techniques((ContinuousBatching(),))
        loop = loop.with_value("workload.arrivals.concurrency", clients)
        return [note for note in run(loop).provenance.notes if "wait" in note]

    # Of 40 requests of 12 clients on 8 seats all wait but the first 8: whoever asks again finds 4 before it.
    assert said(12, max_num_seqs=8) == ["32 requests waited for a seat: engine.max_num_seqs is 8"]
    assert said(9, max_num_seqs=8)
    assert not said(8, max_num_seqs=8), "a seat falls free as its client asks again"
    assert not said(12, max_num_seqs=64, num_blocks=40), "memory is what they wait for"
    assert not said(12)


@pytest.mark.parametrize(
    ("engine", "techniques", "told"),
    [
        ({"profile": "vllm"}, (), True),
        ({"profile": "vllm"}, (ContinuousBatching(),), False),
        ({"profile": "vllm", "batching": "chunked_prefill"}, (), False),
        ({"profile": "vllm", "batching": "static"}, (), False),  # it was asked for
        ({}, (), False),
    ],
)
def test_static_batches_that_nobody_asked_of_an_engine_that_has_none_are_told(engine, techniques, told) -> None:
    notes = run(scenario(engine=engine).with_techniques(techniques)).provenance.notes
    assert any("batches are static" in note for note in notes) == told


@pytest.mark.parametrize("device", ["H100-SXM5", "H200-SXM", "MI300X"])
def test_a_run_is_as_sure_as_one_of_its_steps_is(device: str) -> None:
    one = scenario(hardware=device).with_techniques((ContinuousBatching(),))
    (note,) = (note for note in run(one).provenance.notes if "times of steps" in note)
    at = one.workload.prompts.tokens.median + 18
    step = OperatingPoint.of(one, batch=8, context=round(at), phase="decode").to_json()
    told = int(note.split("±")[1].split("%")[0]) / 100
    assert told == pytest.approx(step["step"]["relative_error"], abs=0.03)
    assert ("no kernel was measured" in note) == (step["origin"]["kind"] == "inherited")
