"""Are a technique's effects those of its physics: half the bytes, fewer steps, gains that fade with the batch?"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.techniques import TECHNIQUES, Speculative, Technique
from membound.simulator.advice.effects import Bench, crossings, share_of_experts
from membound.simulator.costing import ClosedForm, Served
from membound.simulator.load import Lengths, Load

H100 = "H100-SXM5"


def suited(name: str, device: str) -> Technique:
    return TECHNIQUES[name].suited(get_hardware(device))


def _engine(batch: int, model: str = "Llama-3.1-8B", **changes: object) -> Scenario:
    lengths = {"kind": "fixed", "tokens": 256}
    return parse_scenario(
        {
            "name": "engine",
            "model": model,
            "hardware": H100,
            "engine": {"max_num_seqs": 1024},
            "techniques": ["continuous_batching"],
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": batch},
                "requests": 64,
                "prompts": {"kind": "synthetic", "tokens": lengths},
                "output_tokens": lengths,
            },
            **changes,
        }
    )


def _load(batch: float, prompt: float = 1920, output: float = 256) -> Load:
    return Load(batch, Lengths.fixed(prompt, output))


def test_the_gain_is_that_of_the_two_engines_costed_apart() -> None:
    engine, load = _engine(8), _load(8)
    technique = suited("weight_quantization", H100)
    effect = Bench(load).effect(engine, technique)
    before, after = ClosedForm(load)(engine), ClosedForm(load)(engine.with_techniques((*engine.techniques, technique)))
    assert effect.gain("tpot_s") == pytest.approx(before.tpot_s / after.tpot_s)
    assert effect.gain("output_tokens_per_s") == pytest.approx(after.output_tokens_per_s / before.output_tokens_per_s)


def test_weights_in_fewer_bits_move_fewer_bytes_and_nothing_else() -> None:
    bench, engine = Bench(_load(1, 16)), _engine(1)
    works = [bench.effect(engine, suited(name, H100)).work for name in ("int8_weights", "w8a8")]
    for work in works:
        assert work is not None
        assert 0.5 <= work.bytes < 0.6  # half of the weights; scales, cache and activations stay
        assert work.flops == pytest.approx(1.0) and work.steps == 1.0
    int4 = bench.effect(engine, suited("weight_quantization", H100)).work
    assert int4 is not None and 0.25 <= int4.bytes < 0.4


@pytest.mark.parametrize("name", [name for name, technique in TECHNIQUES.items() if technique.layer == "steps"])
def test_speculation_takes_fewer_steps_and_more_arithmetic(name: str) -> None:
    model = "DeepSeek-V3" if name == "mtp" else "Llama-3.1-8B"
    engine = _engine(1, model, hardware="H200-SXM", parallel={"tp": 8})
    effect = Bench(_load(1)).effect(engine, suited(name, "H200-SXM"))
    assert effect.work is not None and effect.after is not None
    drafting = effect.after.served.drafting
    assert drafting is not None
    if drafting["off"]:
        assert effect.work == (1.0, 1.0, 1.0)
    else:
        assert effect.work.steps == pytest.approx(1 / drafting["tokens_per_step"])
        assert effect.work.flops > 1.0 > effect.work.bytes


def test_fixed_drafts_lose_at_large_batches_and_the_best_ones_never_do() -> None:
    eagle = TECHNIQUES["eagle"](name="eagle")
    assert isinstance(eagle, Speculative)
    fixed = eagle.sized(eagle.usual_size)
    gains = {}
    for batch in (1, 512):
        bench = Bench(_load(batch))
        gains[batch] = [bench.effect(_engine(batch), one).gain("tpot_s") for one in (fixed, eagle)]
    assert gains[1][0] is not None and gains[1][0] > 1.5
    assert gains[512][0] is not None and gains[512][0] < 1.0
    assert all(best is not None and best >= 0.999 for _, best in gains.values())


def test_a_static_batch_takes_more_steps_as_it_waits_for_its_longest_output() -> None:
    outputs = Lengths.fixed(512, 256)
    varied = Lengths(outputs.prompts.repeat(3), outputs.outputs.repeat(3) * [0.25, 1.0, 1.75])
    for lengths, steps in ((outputs, 1.0), (varied, None)):
        work = Bench(Load(32.0, lengths)).effect(_engine(32), suited("continuous_batching", H100)).work
        assert work is not None
        if steps is not None:
            assert work.steps == pytest.approx(steps)
        else:
            assert pytest.approx(work.steps, rel=0.01) == 256 / 448  # of 32 outputs one is as long as they get


def test_what_only_a_technique_makes_fit_has_no_gain_but_a_reason() -> None:
    engine = _engine(1, "Llama-3.1-70B")
    bench = Bench(_load(1))
    int4 = bench.effect(engine, suited("weight_quantization", H100))
    assert int4.after is not None and int4.before is None and int4.gain("tpot_s") is None
    assert int4.reason is not None and "does not fit" in int4.reason
    medusa = bench.effect(engine, suited("medusa", H100))
    assert medusa.after is None and medusa.work is None and medusa.reason is not None


def test_what_excludes_a_technique_is_left_out_on_both_sides() -> None:
    engine = _engine(1, techniques=["continuous_batching", "w8a8"])
    alone = Bench(_load(1)).effect(_engine(1), suited("weight_quantization", H100))
    instead = Bench(_load(1)).effect(engine, suited("weight_quantization", H100))
    assert instead.gain("tpot_s") == alone.gain("tpot_s")


def test_a_technique_of_eight_bits_has_the_format_that_the_device_computes() -> None:
    formats = {name: getattr(suited("w8a8", name), "format", "") for name in (H100, "A100-SXM4-80GB")}
    assert formats == {H100: "fp8", "A100-SXM4-80GB": "int8"}


@given(st.floats(0.1, 10.0), st.floats(-3.0, 3.0), st.floats(0.2, 5.0))
def test_crossings_of_a_line_in_ln_x_are_exact(level: float, slope: float, at: float) -> None:
    xs = [0.1, 0.5, 1.0, 4.0, 20.0]
    ys = [level + slope * (math.log(x) - math.log(at)) for x in xs]
    found = crossings(xs, ys, level)
    if abs(slope) < 1e-3:
        return
    assert len(found) == 1
    assert found[0].at == pytest.approx(at) and found[0].rises == (slope > 0)


def test_a_curve_that_stays_on_its_side_crosses_nothing() -> None:
    assert crossings([1, 2, 4], [1.2, 1.1, 1.05]) == [] and crossings([1, 2, 4], [0.9, 1.0, 0.8]) == []


@given(st.floats(1.0, 1000.0), st.floats(1.0, 2.0))
def test_a_larger_batch_reads_more_experts_and_never_more_than_all(tokens: float, more: float) -> None:
    (ffn,) = get_model("Mixtral-8x7B").mixtures
    share, larger = share_of_experts(ffn, tokens), share_of_experts(ffn, tokens * more)
    assert ffn.top_k / ffn.experts <= share + 1e-12 and share <= larger <= 1.0


def test_one_token_reads_the_experts_that_it_chooses_and_a_dense_model_has_none() -> None:
    (ffn,) = get_model("Mixtral-8x7B").mixtures
    assert share_of_experts(ffn, 1) == pytest.approx(2 / 8)
    assert not get_model("Llama-3.1-8B").mixtures


def test_each_engine_is_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costed: list[str] = []
    original = ClosedForm.__call__

    def counted(self: ClosedForm, scenario: Scenario) -> Served:
        costed.append(scenario.digest)
        return original(self, scenario)

    monkeypatch.setattr(ClosedForm, "__call__", counted)
    bench, engine = Bench(_load(4)), _engine(4)
    for name in ("weight_quantization", "kv_quantization", "weight_quantization"):
        bench.effect(engine, suited(name, H100))
    assert len(costed) == len(set(costed)) == 3
