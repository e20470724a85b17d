"""Does a stack obey the laws of its arithmetic, and does it say what overlaps, what helps and what is impossible?"""

from __future__ import annotations

import math
import re
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.techniques import TECHNIQUES, Size
from membound.simulator.advice.advisor import advise
from membound.simulator.costing import Costing, Served
from membound.simulator.stacking.asked import chosen_techniques
from membound.simulator.stacking.document import to_json
from membound.simulator.stacking.game import StackingGame
from membound.simulator.stacking.stacking import Stack, analyse, stack

NAMES = ["weight_quantization", "kv_quantization", "continuous_batching", "eagle"]


def scenario(**changes: Any) -> Scenario:
    document = {
        "name": "stacked",
        "model": "Llama-3.1-8B",
        "hardware": "H100-SXM5",
        "engine": {"max_num_seqs": 64},
        "techniques": [{"name": name} for name in NAMES],
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": 8},
            "requests": 32,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 256}},
            "output_tokens": {"kind": "uniform", "low": 16, "high": 64},
        },
    }
    return parse_scenario(document | changes)


def pair(first: str, second: str, *, batch: int, context: int) -> float:
    """Real gain against product, in time per output token."""
    plain = scenario(techniques=[])
    (found,) = stack(plain, techniques=[first, second], batches=[batch], contexts=[context], metric="tpot_s")
    (both,) = found.pairs
    assert both.ratio is not None and found.product is not None and found.together is not None
    assert both.ratio == pytest.approx(found.together / found.product)
    return both.ratio


@pytest.fixture(scope="module")
def stacks() -> list[Stack]:
    return stack(scenario(), batches=[1, 64], contexts=[512, 8192])


def test_there_is_a_stack_at_each_batch_and_context(stacks):
    assert [s.point for s in stacks] == [{"batch": b, "context": c} for b in (1, 64) for c in (512, 8192)]
    for found in stacks:
        assert "Llama-3.1-8B on H100-SXM5" in found.conditions and found.members == tuple(NAMES)


def test_shapley_shares_sum_to_the_whole_ln_gain(stacks):
    for found in stacks:
        assert sum(found.shapley.values()) == pytest.approx(math.log(found.together), abs=1e-12)


def test_every_order_ends_at_the_same_gain_and_its_steps_multiply_to_it(stacks):
    for found in stacks:
        for order in (found.given_order, found.greedy_order, found.best_order):
            assert order[-1].together == pytest.approx(found.together)
            assert math.prod(step.gain for step in order) == pytest.approx(found.together)
            for before, after in pairwise(order):
                assert before.bottleneck_after == after.bottleneck_before


def test_no_order_gains_more_on_its_way_than_the_best_one(stacks):
    def on_the_way(order):
        return sum(math.log(step.together) for step in order)

    for found in stacks:
        best = on_the_way(found.best_order)
        assert best >= on_the_way(found.given_order) - 1e-12
        assert best >= on_the_way(found.greedy_order) - 1e-12


def test_the_best_subset_is_never_worse_than_all_together(stacks):
    for found in stacks:
        assert found.best_subset_gain >= max(1.0, found.together) - 1e-12


@pytest.mark.parametrize("batch", [1, 8])
def test_two_techniques_that_save_the_same_bytes_gain_less_than_their_product(batch):
    assert pair("weight_quantization", "sparsity_2_4", batch=batch, context=512) < 1.0


def test_speculation_over_small_weights_gains_less_than_the_product_once_arithmetic_binds():
    assert pair("weight_quantization", "eagle", batch=8, context=512) < 1.0


def test_savings_of_different_bytes_make_room_for_each_other():
    """Weights w and cache k, each a part of the time: halving both gains more than the product of halving each."""
    assert pair("weight_quantization", "kv_quantization", batch=64, context=8192) > 1.0


def test_four_bits_gain_most_at_batch_one_and_a_fixed_tree_loses_when_arithmetic_binds():
    tree = [{"name": "weight_quantization"}, {"name": "eagle", "depth": 5, "tree_size": 25}]
    engine = {"max_num_seqs": 64, "max_batched_tokens": 65536}  # no sequence waits for the batch's other prompts
    few, many = stack(scenario(techniques=tree, engine=engine), batches=[1, 64], contexts=[512], metric="tpot_s")
    gains = [{step.technique: step.gain for step in found.alone} for found in (few, many)]
    assert gains[0]["weight_quantization"] > gains[1]["weight_quantization"] > 1.0
    assert gains[0]["eagle"] > 1.5 and gains[1]["eagle"] < 1.0


@pytest.mark.parametrize("name", ["eagle", "medusa", "ngram_speculation", "draft_model_speculation"])
def test_drafts_that_nobody_sized_never_lose_and_beat_those_of_any_size(name):
    """What is chosen is named in the row; a size that the scenario names is kept, whatever it costs."""
    few, many = stack(scenario(techniques=[]), techniques=[name], batches=[1, 256], contexts=[2048], metric="tpot_s")
    (best,) = few.alone
    assert best.drafting["chosen"] and best.drafting["tokens_per_step"] > 1.0
    assert best.drafting["alpha_from"].startswith(("assumed", "counted by others"))
    for found in (few, many):
        assert found.alone[0].gain >= 1.0 - 1e-9
    if not many.alone[0].drafting["off"]:
        assert many.alone[0].drafting["depth"] <= best.drafting["depth"]
    fixed = TECHNIQUES[name](name=name).sized(Size(3, 12)).model_dump()
    (given,) = stack(scenario(techniques=[fixed]), batches=[1], contexts=[2048], metric="tpot_s")
    assert not given.alone[0].drafting["chosen"] and given.alone[0].drafting["depth"] == 3
    assert given.alone[0].gain <= best.gain + 1e-9


def test_guesses_that_are_never_right_are_switched_off():
    hopeless = {"name": "eagle", "alpha": 0.0}
    (found,) = stack(scenario(techniques=[hopeless]), batches=[8], contexts=[512], metric="tpot_s")
    assert found.alone[0].drafting["off"] and found.alone[0].gain == pytest.approx(1.0)


def test_a_static_batch_whose_prompts_take_several_steps_is_the_same_by_closed_form_and_simulation():
    """32 prompts of 1024 tokens with 8192 tokens a step: the batch is filled in four steps and decodes together."""
    prompts = {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 1024}}
    many = scenario(techniques=[]).with_value("workload.prompts", prompts)
    many = many.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 64})
    asked = {"techniques": ["kv_quantization"], "batches": [32], "metric": "tpot_s"}
    (closed,), (run,) = stack(many, **asked), stack(many, **asked, simulate=True)
    assert run.plain.tpot_s == pytest.approx(closed.plain.tpot_s, rel=0.03)
    assert run.plain.output_tokens_per_s == pytest.approx(closed.plain.output_tokens_per_s, rel=0.03)
    assert run.plain.batch > 30


def test_combinations_that_exclude_each_other_are_refused_with_the_reason_and_take_no_part():
    names = ["weight_quantization", "w8a8", "mtp", "eagle"]
    (found,) = stack(scenario(techniques=[]), techniques=names, batches=[1])
    alone = {step.technique: step for step in found.alone}
    assert alone["mtp"].gain is None and "no module for multi-token prediction" in alone["mtp"].reason
    assert alone["w8a8"].gain > 1.0
    refused = {step.technique: step.reason for step in found.given_order if step.reason}
    assert set(refused) == {"w8a8", "mtp"} and "at once" in refused["w8a8"]
    assert found.members == ("weight_quantization", "eagle") == tuple(found.shapley)
    both = {(p.first, p.second): p for p in found.pairs}["weight_quantization", "w8a8"]
    assert both.real is None and "at once" in both.reason


def test_a_point_at_which_the_plain_engine_does_not_fit_says_so():
    (found,) = stack(scenario(model="Llama-3.1-70B"), batches=[1])
    assert found.plain is None and "does not fit" in found.reason and found.alone == ()


def test_a_technique_gains_in_a_stack_what_advice_says_of_it_on_an_engine_that_batches_continuously():
    asked = scenario(techniques=[{"name": "continuous_batching"}])
    (found,) = stack(asked, techniques=["weight_quantization", "kv_quantization"], metric="tpot_s")
    assert found.plain is not None and any("keeps continuous_batching" in note for note in found.notes)
    advised = {one.move.name: one.gain for one in advise(asked, metric="tpot_s").moves}
    for step in found.alone:
        assert step.gain == pytest.approx(advised[step.technique], rel=0.01)
    (both,) = stack(asked, techniques=["continuous_batching", "weight_quantization"])
    assert not any("keeps" in note for note in both.notes) and both.alone[0].technique == "continuous_batching"


def test_small_weights_leave_room_for_a_larger_batch():
    narrow = scenario(hardware="L4")
    (found,) = stack(narrow, techniques=["weight_quantization"], batches=[64], contexts=[1024])
    assert found.alone[0].batch > found.plain.batch
    (rate,) = stack(
        narrow, techniques=["weight_quantization"], batches=[64], contexts=[1024], metric="output_tokens_per_s"
    )
    assert rate.alone[0].gain > 1.0


def test_the_sweep_of_the_scenario_gives_the_points():
    swept = scenario(sweep=[{"workload.arrivals.concurrency": 1}, {"workload.arrivals.concurrency": 16}])
    assert [s.point for s in stack(swept)] == list(swept.sweep)


def test_simulation_and_closed_form_agree_on_a_steady_load():
    """Fixed lengths in a closed loop: what remains is the phase of the clients."""
    fixed = {"kind": "fixed", "tokens": 64}
    steady = scenario().with_value("workload.output_tokens", fixed)
    names = ["weight_quantization", "kv_quantization"]
    (closed,) = stack(steady, techniques=names, metric="tpot_s")
    (run,) = stack(steady, techniques=names, metric="tpot_s", simulate=True)
    assert run.plain.tpot_s == pytest.approx(closed.plain.tpot_s, rel=0.05)
    assert run.together == pytest.approx(closed.together, rel=0.05)
    assert sum(run.shapley.values()) == pytest.approx(math.log(run.together))


@pytest.mark.parametrize("simulate", [False, True])
def test_arrivals_that_vary_are_stacked_in_their_busiest_part(simulate):
    """As many sequences decode together as where the peak's 18 requests a second come all the time."""
    base = scenario().with_value("workload.requests", 400)
    arrivals = {"kind": "sine", "rate_rps": 10, "swing": 0.8}, {"kind": "poisson", "rate_rps": 18}
    asked = [base.with_value("workload.arrivals", one) for one in arrivals]
    (day,), (peak,) = (stack(one, techniques=["weight_quantization"], simulate=simulate) for one in asked)
    assert "(18 requests/s at 14:00, where the mean is 10)" in day.conditions and "busiest" not in peak.conditions
    assert day.plain.batch == pytest.approx(peak.plain.batch, rel=0.15 if simulate else 1e-9)


def test_the_document_names_baseline_metric_and_conditions(stacks):
    document = to_json(stacks, chosen_techniques(scenario(), None))
    first = document["stacks"][0]
    assert {"metric", "baseline", "conditions", "together", "product", "ratio", "lossless"} <= set(first)
    assert first["ratio"] == pytest.approx(first["together"] / first["product"])
    for row in first["alone"]:
        assert row["low"] < row["gain"] < row["high"] and row["baseline"]
    assert not first["lossless"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["fp4"], "technique 'fp4' is unknown"),
        (["egale"], "did you mean 'eagle'"),
        (["eagle", "eagle"], "names eagle twice"),
        (["weight_quantization:int3", "weight_quantization:int4"], "compare its formats as points of a sweep"),
        (["weight_quantization:blue"], "precision 'blue' is unknown"),
        (["eagle:int4"], "eagle has none"),
        (["prefix_caching"], "--set 'engine.prefix_caching=true'"),
        (["chunked_prefill"], "--set 'engine.batching=chunked_prefill'"),
        (["tensor_parallel"], r"--set 'parallel\.tp=2'"),
        (None, "names no techniques"),
    ],
)
def test_wrong_techniques_are_one_sentence(names, said):
    with pytest.raises(MemboundError, match=said):
        stack(scenario(techniques=[]), techniques=names)


# --- the game itself, on values that nobody computed ---


def game_of(values: dict[frozenset[int], float | None], count: int) -> StackingGame:
    """Techniques whose subsets take these times; None is impossible."""
    techniques = [TECHNIQUES[name](name=name) for name in list(TECHNIQUES)[:count]]
    game = StackingGame(techniques, scenario(), Costing(lambda _: pytest.fail("all values are given")), "tpot_s")
    for subset, seconds in values.items():
        game._served[subset] = "no" if seconds is None else Served(seconds, 1.0 / seconds, 1.0, "compute", {})
    return game


def subsets(count: int) -> list[frozenset[int]]:
    return [frozenset(i for i in range(count) if bits >> i & 1) for bits in range(2**count)]


@settings(max_examples=60)
@given(st.data())
def test_shapley_is_the_mean_contribution_over_all_orders(data):
    count = data.draw(st.integers(1, 4))
    values = {subset: data.draw(st.floats(0.1, 10.0)) for subset in subsets(count)}
    game = game_of(values, count)
    orders = list(permutations(range(count)))
    for member, share in game.shapley(range(count)).items():
        total = 0.0
        for order in orders:
            before = frozenset(order[: order.index(member)])
            total += math.log(values[before] / values[before | {member}])
        assert share == pytest.approx(total / len(orders), abs=1e-9)


@settings(max_examples=60)
@given(st.data())
def test_impossible_subsets_are_in_no_order(data):
    values: dict[frozenset[int], float | None] = {}
    for subset in subsets(4):
        seconds = data.draw(st.floats(0.1, 10.0))
        impossible = 0 < len(subset) < 4 and data.draw(st.booleans())
        values[subset] = None if impossible else seconds
    game = game_of(values, 4)
    shares, order = game.shapley(range(4)), game.best_order(range(4))
    assert (shares is None) == (order is None)
    if order is not None:
        assert all(values[frozenset(order[:length])] is not None for length in range(5))
        assert sum(shares.values()) == pytest.approx(math.log(values[frozenset()] / values[frozenset(range(4))]))


def test_a_technique_that_never_matters_has_no_share():
    values = {subset: 0.5 if 0 in subset else 1.0 for subset in subsets(3)}
    shares = game_of(values, 3).shapley(range(3))
    assert shares[0] == pytest.approx(math.log(2)) and shares[1] == shares[2] == 0.0


def test_a_format_in_a_name_is_that_of_the_technique():
    named = chosen_techniques(scenario(), ["weight_quantization:int8", "kv_quantization:int4", "eagle"])
    assert [getattr(one, "format", None) for one in named] == ["int8", "int4", None]
    narrow, wide = (
        stack(scenario(techniques=[]), techniques=[f"weight_quantization:{name}"], batches=[1])[0].together
        for name in ("int4", "int8")
    )
    assert narrow > wide > 1.0


def test_what_techniques_leave_out_and_what_a_device_lacks_are_noted():
    (found,) = stack(scenario(hardware="A100-SXM4-80GB"), techniques=["w8a8:fp8"], batches=[4])
    said = " ".join(found.notes)
    assert "keeps continuous_batching" in said and "without weight_quantization, kv_quantization, eagle" in said
    assert "no matrix unit for fp8" in said
    assert not stack(scenario(), batches=[4])[0].notes


def test_static_batches_that_nobody_asked_for_are_noted():
    def said(**engine: Any) -> bool:
        asked = scenario(techniques=[], engine={"profile": "vllm", **engine})
        (found,) = stack(asked, techniques=["weight_quantization"], batches=[4])
        return any("batches are static" in note for note in found.notes)

    assert said() and not said(batching="static") and not said(batching="continuous")


def test_too_many_techniques_for_all_subsets_still_have_orders_and_a_product():
    values = {subset: 1.0 / (1 + len(subset)) for subset in subsets(3)}
    found = analyse(game_of(values, 3), {}, 0.1, "made up", most_factorial=2)
    assert found.shapley is None and found.best_order is None
    assert found.together == pytest.approx(4.0) and found.product == pytest.approx(8.0)


def waiting(hardware: str, concurrency: int, prompt_tokens: int, engine: dict | None = None) -> Scenario:
    """Clients of whom some may wait."""
    return parse_scenario(
        {
            "name": "waiting",
            "model": "Llama-3.1-8B",
            "hardware": hardware,
            "engine": engine or {},
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": concurrency},
                "requests": 64,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": prompt_tokens}},
                "output_tokens": {"kind": "fixed", "tokens": 64},
            },
        }
    )


def test_a_note_says_that_requests_wait_for_a_seat():
    def said(concurrency: int, seats: int) -> list[str]:
        (found,) = stack(waiting("H100-SXM5", concurrency, 256, {"max_num_seqs": seats}), techniques=["w8a8"])
        return [note for note in found.notes if "seat" in note]

    assert said(64, 16) == ["48 requests wait for a seat: engine.max_num_seqs is 16"]
    assert not said(16, 16)


def test_a_note_says_that_memory_holds_fewer_than_wait():
    chosen = waiting("L4", 32, 8000)
    (found,) = stack(chosen, techniques=["kv_quantization"])
    assert any("of the 32 sequences, the others wait" in note for note in found.notes)
    assert any("--metric output_tokens_per_s" in note for note in found.notes)
    (found,) = stack(chosen, techniques=["kv_quantization"], metric="output_tokens_per_s")
    assert not any("--metric" in note for note in found.notes)
    (found,) = stack(chosen, techniques=["kv_quantization"], batches=[2])
    assert not any("others wait" in note for note in found.notes)


def test_where_all_that_arrives_is_served_runs_gain_no_throughput_and_are_judged_by_the_time_per_token() -> None:
    """8-bit weights halve the time per token, and as many tokens as before are asked for."""
    arrivals = {"kind": "poisson", "rate_rps": 4.0}
    asked = scenario(techniques=[{"name": "continuous_batching"}]).with_value("workload.arrivals", arrivals)
    options: dict[str, Any] = {"techniques": ["w8a8"], "simulate": True}
    (usual,), (rate,) = stack(asked, **options), stack(asked, **options, metric="output_tokens_per_s")
    assert usual.metric == "tpot_s" and usual.together is not None and usual.together > 1.3
    assert rate.together is not None and rate.together < 1.05
    assert any("tokens/s are those of the arrivals" in note for note in usual.notes)
    assert any("--metric tpot_s shows gains" in note for note in rate.notes)
    (flooded,) = stack(asked.with_value("workload.arrivals.rate_rps", 4000.0), **options)
    assert flooded.metric == "output_tokens_per_s" and not any("arrivals" in note for note in flooded.notes)


@pytest.mark.parametrize(
    ("named", "compared"),
    [
        (
            "chunked_prefill",
            "simulate` with --set 'engine.batching=continuous' and with --set 'engine.batching=chunked",
        ),
        ("prefix_caching", "simulate` without and with --set 'engine.prefix_caching=true'"),
    ],
)
def test_a_setting_named_as_a_technique_says_which_two_runs_differ_by_it(named: str, compared: str) -> None:
    """Of an engine that chunks prompts by itself, leaving the setting out changes nothing."""
    with pytest.raises(MemboundError, match=re.escape(compared)):
        stack(scenario(engine={"profile": "vllm"}), techniques=[named])
