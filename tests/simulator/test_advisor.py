"""Does the advice name the bottleneck, rank by what it costs, and agree with the rules where they should hold?"""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from membound.app.reports.advice import advice as report
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.techniques import TECHNIQUES
from membound.simulator.advice.advisor import Advice, Advised, advise, to_json
from membound.simulator.advice.rules import RULES, SMALL_MODEL_PARAMS
from membound.simulator.advice.situation import ridge_tokens
from membound.simulator.deployment import deployment_of
from membound.simulator.workers import Workers


def scenario(concurrency: int = 1, prompt: int = 512, output: int = 128, **changes: Any) -> Scenario:
    document = {
        "name": "advised",
        "model": "Llama-3.1-8B",
        "hardware": "H100-SXM5",
        "engine": {"max_num_seqs": 512},
        "techniques": [{"name": "continuous_batching"}],
        "workload": {
            "arrivals": {"kind": "closed_loop", "concurrency": concurrency},
            "requests": 4 * concurrency,
            "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": prompt}},
            "output_tokens": {"kind": "fixed", "tokens": output},
        },
    }
    return parse_scenario(document | changes)


def moves(advice: Advice) -> dict[str, Advised]:
    return {one.move.name: one for one in advice.moves}


def rules(advice: Advice) -> dict[str, bool | None]:
    return {one.rule.id: one.agrees for one in advice.rules}


def gains(advice: Advice) -> list[float]:
    return [one.gain for one in advice.moves if one.gain is not None]


def test_the_rules_are_r0_to_r8_and_name_techniques_that_exist():
    assert [rule.id for rule in RULES] == [f"R{number}" for number in range(9)]
    named = {move for rule in RULES for move in rule.first_moves}
    assert named - set(TECHNIQUES) <= {"prefix_caching", "disaggregation", "tensor_parallel"}
    assert all(rule.source and rule.condition for rule in RULES)


@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        ("Llama-3.1-8B", "H100-SXM5"),
        ("Qwen2.5-14B", "A100-SXM4-80GB"),
        ("Llama-2-7B", "RTX-4090"),
        ("Qwen3-8B", "L40S"),
    ],
)
def test_r1_few_sequences_want_small_weights_or_speculation(model, hardware):
    advice = advise(scenario(2, model=model, hardware=hardware))
    assert advice.metric == "tpot_s" and advice.situation.bottleneck == "memory_weights"
    assert rules(advice)["R0"] and rules(advice)["R1"]


def test_r2_waiting_requests_want_room_in_the_cache():
    """Llama-2-7B has no grouped heads: half a megabyte a token."""
    crowded = scenario(400, 256, 1024, model="Llama-2-7B", hardware="A100-SXM4-80GB")
    advice = advise(crowded)
    assert advice.metric == "output_tokens_per_s" and advice.situation.queued > 0
    assert advice.situation.bottleneck == "memory_kv" and rules(advice)["R2"]
    narrow = moves(advice)["kv_quantization"]
    assert narrow.gain > 1.3 and narrow.after.batch > 1.5 * narrow.before.batch


def test_r3_a_model_that_does_not_fit_wants_fewer_bits_the_least_loss_first():
    advice = advise(scenario(model="Llama-3.1-70B"))
    assert rules(advice)["R3"] and advice.now is None and not advice.situation.fits
    fitting = [one for one in advice.moves if one.after is not None]
    lossy = [one.move.name for one in fitting if one.move.technique is not None]
    assert lossy == ["w8a8", "weight_quantization"]
    assert all(one.gain is None and "makes it fit" in one.why for one in fitting)


def test_r4_what_does_not_fit_in_four_bits_wants_more_devices():
    advice = advise(scenario(model="Llama-3.1-405B"))
    assert "R4" in rules(advice) and "R3" not in rules(advice)
    wider = moves(advice)["tensor_parallel"]
    assert wider.after is not None and wider.move.after.parallel.tp == 16
    assert wider.move.price == "16 devices instead of 1"


@pytest.mark.parametrize("batch", [64, 256])
def test_r5_speculation_that_fills_the_matrix_unit_loses(batch):
    speculating = [{"name": "continuous_batching"}, {"name": "eagle", "depth": 5, "tree_size": 25}]
    advice = advise(scenario(batch, techniques=speculating))
    assert rules(advice)["R5"] is True
    eagle = moves(advice)["eagle"]
    assert eagle.move.state == "on" and eagle.gain < 1.0


def test_r5_is_silent_where_speculation_pays():
    speculating = [{"name": "continuous_batching"}, {"name": "eagle"}]
    advice = advise(scenario(1, techniques=speculating))
    assert "R5" not in rules(advice) and moves(advice)["eagle"].gain > 1.5


def ridge(**changes: Any) -> float:
    asked = scenario(8, **changes)
    return ridge_tokens(deployment_of(asked, resolve_model(asked.model), get_hardware(asked.hardware)), 8.0)


@pytest.mark.parametrize(("device", "tokens"), [("A100-SXM4-80GB", 153), ("H100-SXM5", 295), ("H200-SXM", 206)])
def test_the_ridge_of_16_bit_weights_is_that_of_the_ledger(device, tokens):
    """Section (c) of claims.md lists 153, 295 and 206 tokens."""
    assert ridge(hardware=device) == pytest.approx(tokens, rel=0.02)


def test_the_ridge_follows_the_arithmetic_that_a_format_is_multiplied_in():
    """4-bit weights are multiplied in 16 bits and cross at a quarter; 8-bit ones in fp8, at twice the rate, and cross
    where 16-bit ones do. The lm_head keeps its 16 bits, so that both are a little off."""
    continuous = {"name": "continuous_batching"}
    wide = ridge()
    narrow = ridge(techniques=[continuous, {"name": "weight_quantization", "format": "int4"}])
    eight = ridge(techniques=[continuous, {"name": "w8a8"}])
    assert 0.25 * wide < narrow < 0.35 * wide
    assert eight == pytest.approx(wide, rel=0.02)


def test_experts_of_a_mixture_each_multiply_their_share_of_the_tokens():
    """Mixtral routes a token to 2 of 8 experts: each sees a quarter, and nearly all weights are experts'."""
    parallel = {"tp": 2}
    assert ridge(model="Mixtral-8x7B", parallel=parallel) == pytest.approx(4.0 * ridge(parallel=parallel), rel=0.1)


def arriving(**arrivals: Any) -> Scenario:
    return scenario(1).with_value("workload.arrivals", arrivals).with_value("workload.requests", 600)


def test_advice_on_arrivals_that_vary_is_for_their_busiest_part_as_a_plan_is():
    """Of a day with a mean of 10 requests a second it is that of 18 a second, at two in the afternoon, and says so."""
    day = advise(arriving(kind="sine", rate_rps=10, swing=0.8))
    peak = advise(arriving(kind="poisson", rate_rps=18))
    assert "in the busiest part (18 requests/s at 14:00, where the mean is 10)" in day.conditions
    assert "busiest" not in peak.conditions
    assert day.situation.batch == pytest.approx(peak.situation.batch)
    assert gains(day) == pytest.approx(gains(peak))


def test_r6_wants_long_prompts_many_devices_and_a_strict_objective():
    engine = {"max_num_seqs": 512, "batching": "chunked_prefill"}
    strict = scenario(128, 8192, 256, model="Llama-3.1-70B", parallel={"tp": 8}, engine=engine)
    loose = advise(strict)
    now_s = loose.now.tpot_s
    assert "R6" not in rules(loose)
    advice = advise(strict.with_value("slo.tpot_s", 0.9 * now_s))
    assert "R6" in rules(advice)
    assert "R6" not in rules(advise(strict.with_value("slo.tpot_s", 1.1 * now_s)))


def test_r7_conversations_keep_their_cache_and_only_a_simulation_knows_its_gain():
    talk = {
        "kind": "sessions",
        "tokens": {"kind": "fixed", "tokens": 200},
        "turns": {"kind": "fixed", "count": 4},
        "think": {"kind": "fixed", "seconds": 0.1},
        "system_tokens": 1000,
    }
    asked = scenario(4).with_value("workload.prompts", talk)
    advice = advise(asked)
    assert "R7" in rules(advice)
    assert moves(advice)["prefix_caching"].gain is None and "--simulate" in moves(advice)["prefix_caching"].why


def test_r8_holds_for_small_models_only():
    assert "R8" in rules(advise(scenario()))
    assert "R8" not in rules(advise(scenario(model="Qwen2.5-14B")))
    (rule,) = (found.rule for found in advise(scenario()).rules if found.rule.id == "R8")
    assert resolve_model("Llama-3.1-8B").params <= SMALL_MODEL_PARAMS
    assert f"{SMALL_MODEL_PARAMS / 1e9}" in rule.condition


@pytest.mark.parametrize(
    ("model", "device", "left_out", "kept"),
    [
        ("DeepSeek-V3", "H100-SXM5", "w8a8", "weight_quantization"),
        ("gpt-oss-120b", "H100-SXM5", "weight_quantization", "kv_quantization"),
        ("Llama-3.1-70B", "H100-SXM5", None, "w8a8"),
    ],
)
def test_what_a_model_is_published_in_is_no_move(model, device, left_out, kept):
    asked = scenario(model=model).with_value("hardware", device).with_value("parallel", {"tp": 16})
    found = moves(advise(asked))
    assert left_out not in found and kept in found


@pytest.mark.parametrize(
    ("name", "device", "left_out", "kept"),
    [
        ("Qwen/Qwen3-8B-FP8", "H100-SXM5", "w8a8", "weight_quantization"),
        ("Qwen/Qwen3-8B-AWQ", "H100-SXM5", "weight_quantization", "w8a8"),
    ],
)
def test_what_the_name_of_a_checkpoint_tells_is_no_move(name, device, left_out, kept):
    found = moves(advise(scenario(model=name, hardware=device)))
    assert left_out not in found and kept in found


@pytest.mark.parametrize(
    ("device", "format", "activations"),
    [("H100-SXM5", "awq", None), ("B200-SXM", "nvfp4", "nvfp4"), ("MI355X", "mxfp4", "mxfp4")],
)
def test_four_bits_are_advised_as_engines_of_the_device_have_them(device, format, activations):
    technique = moves(advise(scenario(hardware=device)))["weight_quantization"].move.technique
    assert (technique.format, technique.activations) == (format, activations)


@pytest.mark.parametrize("concurrency", [1, 16, 128])
def test_moves_are_ranked_by_their_gains_and_each_has_interval_reason_and_price(concurrency):
    advice = advise(scenario(concurrency))
    known = [one for one in advice.moves if one.gain is not None]
    helps = [one.gain for one in known if one.gain > 1.0 and not one.move.quality.heavy]
    assert gains(advice)[: len(helps)] == sorted(helps, reverse=True)
    rest = gains(advice)[len(helps) :]
    assert rest == sorted(rest, reverse=True)
    for one in advice.moves:
        assert one.why
        if one.gain is not None:
            assert one.low < one.gain < one.high
        assert one.move.quality.note and one.move.quality.source


@pytest.mark.parametrize(("concurrency", "prompt"), [(64, 512), (32, 3000)])
def test_a_reason_says_a_loss_of_a_loss_and_of_nothing_else(concurrency, prompt):
    advice = advise(scenario(concurrency, prompt))
    assert any(gain < 0.99 for gain in gains(advice)) and any(gain > 1.01 for gain in gains(advice))
    for one in advice.moves:
        if one.gain is not None and abs(one.gain - 1.0) > 0.01:
            assert one.why.startswith("a loss: ") == (one.gain < 1.0)


@pytest.mark.parametrize("batch", [1, 64])
def test_the_bare_roofs_are_those_of_the_data_sheet(batch):
    """Weights over bandwidth, two FLOPs a weight and token over the peak; the engine cannot be as fast."""
    advice = advise(scenario(batch, 512))
    model, h100 = resolve_model("Llama-3.1-8B"), get_hardware("H100-SXM5")
    read = model.params - model.vocab * model.hidden  # embeddings are looked up
    seconds = advice.situation.seconds
    assert seconds["memory_weights"] == pytest.approx(2.0 * read / h100.bandwidth_bytes_per_s, rel=0.01)
    assert seconds["compute"] == pytest.approx(2.0 * read * batch / h100.peak_flops("bf16"), rel=0.1)
    assert max(seconds.values()) < advice.now.tpot_s


def test_the_bottleneck_of_advice_counts_prompts():
    document = to_json(advise(scenario(64, 3500, 32)))
    seconds = document["roof_seconds"]
    assert document["bottleneck"] == "compute" == document["now"]["bottleneck"]
    assert max(seconds, key=seconds.__getitem__) != "compute"


def test_what_takes_more_devices_says_what_each_gains():
    advice = advise(scenario(16))
    for one in advice.moves:
        if one.move.name == "tensor_parallel":
            assert one.gain_per_device == pytest.approx(one.other_gain / 2) and one.gain_per_device < 1.0
        else:
            assert one.gain_per_device is None


def test_a_price_is_a_figure_with_its_source():
    lossy = [one.move.quality for one in advise(scenario()).moves if one.move.quality.rank]
    assert lossy and all(any(map(str.isdigit, quality.note)) and quality.source for quality in lossy)
    assert all(quality.brief and quality.loss > 0.0 for quality in lossy)


def test_what_costs_as_much_quality_as_a_smaller_model_stands_behind_what_is_lossless():
    """Long outputs, whose cache binds: eviction gains the most, and costs a sixth of perplexity."""
    advice = advise(scenario(256, 512, 16_000, engine={"max_num_seqs": 512, "profile": "vllm"}))
    order = [one.move.name for one in advice.moves]
    assert moves(advice)["kv_eviction"].gain > 1.0
    assert max(order.index(name) for name in ("eagle", "kv_quantization")) < order.index("kv_eviction")


def test_what_doubles_perplexity_does_not_stand_before_what_helps_without_and_shows_its_figure():
    advice = advise(scenario(16))
    names = [one.move.name for one in advice.moves]
    sparse = moves(advice)["sparsity_2_4"]
    assert sparse.move.quality.heavy and sparse.gain > 1.0
    before = [one for one in advice.moves if one.gain is not None and one.gain > 1.0 and not one.move.quality.heavy]
    assert all(names.index("sparsity_2_4") > names.index(one.move.name) for one in before)
    words = io.StringIO()
    Console(file=words, width=120).print(report(to_json(advice)))
    (row,) = (line for line in words.getvalue().splitlines() if line.startswith("2:4 sparsity (magnitude)"))
    assert "perplexity +99%" in row


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {"groups": [{"count": 3}]}}, "field 'cluster' names replicas"),
        ({"engine": {"prefix_caching": True}}, "only a simulation knows what a prefix cache saves"),
        ({"engine": {"max_batched_tokens": 256}}, "640 tokens exceed max_batched_tokens"),
    ],
)
def test_what_advice_cannot_be_given_of_is_refused_in_a_sentence(changes, said):
    with pytest.raises(MemboundError, match=said):
        advise(scenario(**changes))


def test_what_the_engine_has_is_judged_by_leaving_it_out_and_what_it_excludes_takes_its_place():
    has = scenario(4, techniques=[{"name": "continuous_batching"}, {"name": "int8_weights"}])
    found = moves(advise(has))
    assert found["int8_weights"].move.state == "on" and found["int8_weights"].gain > 1.0
    narrow = found["weight_quantization"]
    assert narrow.move.state == "instead" and narrow.move.instead_of == ("int8_weights",)
    assert 1.0 < narrow.gain < moves(advise(scenario(4)))["weight_quantization"].gain


def test_rivals_and_overlapping_gains_are_not_to_be_combined():
    conflicts = {conflict.moves: conflict for conflict in advise(scenario(1)).conflicts}
    overlap = conflicts["eagle", "weight_quantization"]
    assert overlap.real < 0.9 * overlap.product and "do not multiply" in overlap.reason
    assert any("exclude each other" in conflict.reason and "eagle" in names for names, conflict in conflicts.items())


def test_lossless_techniques_cost_no_quality_and_fewer_bits_cost_more():
    def rank(name: str, **fields: Any) -> int:
        return TECHNIQUES[name](name=name, **fields).quality.rank

    for name, technique in TECHNIQUES.items():
        assert (rank(name) == 0) == technique.lossless
    bits = ("int8", "int4", "ternary")
    ranks = [rank("weight_quantization", format=name) for name in bits]
    assert ranks == sorted(set(ranks))


def test_simulation_ranks_the_same_first_move():
    loaded = scenario(2, 256, 32)
    closed = advise(loaded)
    run = advise(loaded, simulate=True, workers=Workers("sequential"))
    assert closed.moves[0].move.name in [one.move.name for one in run.moves if one.gain is not None][:2]
    assert run.by == "simulation" and run.now.tpot_s == pytest.approx(closed.now.tpot_s, rel=0.1)


def test_the_document_has_all_of_it():
    document = to_json(advise(scenario(64)))
    assert {"bottleneck", "roof_seconds", "moves", "rules", "do_not_combine", "metric", "conditions"} <= set(document)
    for move in document["moves"]:
        assert {"move", "gain", "low", "high", "baseline", "lossless", "quality", "reason", "state"} <= set(move)


def test_unknown_names_are_one_sentence():
    with pytest.raises(MemboundError, match="hardware 'H1000' is unknown"):
        advise(scenario(hardware="H1000"))


def test_more_seats_are_a_move_where_requests_wait_for_them_and_memory_has_room():
    def seats(concurrency: int, **changes: Any) -> Advised | None:
        return moves(advise(scenario(concurrency, **changes))).get("more_seats")

    found = seats(64, engine={"max_num_seqs": 16})
    assert found is not None and found.move.after is not None and found.move.after.seats == 64
    assert found.gain is not None and 1.0 < found.gain <= 4.0, "at most as many times as there are seats"
    assert seats(16, engine={"max_num_seqs": 16}) is None
    assert seats(64, engine={"max_num_seqs": 16}, hardware="RTX-4090", prompt=3900) is None, "no memory for more"
    rate = scenario(1, engine={"max_num_seqs": 4}).model_dump(mode="json")
    rate["workload"]["arrivals"] = {"kind": "poisson", "rate_rps": 1000.0}
    over = moves(advise(parse_scenario(rate)))["more_seats"]
    assert over.gain is not None and over.gain > 1.0, "more arrive than four seats serve"
