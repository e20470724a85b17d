"""What a comparison measures beside the plain engine: techniques alone, stacks, and settings."""

from __future__ import annotations

from typing import Any

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario, load_scenario, parse_scenario


def with_variants(*variants: Any) -> Scenario:
    plain = load_scenario("live-cpu").with_techniques(()).model_dump(mode="json")
    return parse_scenario(plain | {"variants": list(variants), "techniques": []})


def test_without_variants_each_technique_is_one() -> None:
    scenario = load_scenario("live-cpu")
    assert [one.name for one in scenario.compared()] == [one.name for one in scenario.techniques]
    for variant, technique in zip(scenario.compared(), scenario.techniques, strict=True):
        assert variant.title == technique.title and variant.gain_metric == technique.gain_metric
        assert variant.compared_with(scenario.with_techniques(())) == technique.baseline


def test_short_forms_name_themselves() -> None:
    scenario = with_variants(
        "int8_weights",
        {"name": "weight_quantization", "format": "int4"},
        {"name": "weight_quantization", "format": "int4", "activations": "int8", "lm_head": "int8", "method": "gptq"},
        ["int8_weights", {"name": "ngram_speculation", "gamma": 4}],
        {"name": "chunks", "beside": ["continuous_batching"], "set": {"engine.batching": "chunked_prefill"}},
    )
    assert [one.name for one in scenario.compared()] == [
        "int8_weights",
        "weight_quantization int4",
        "weight_quantization int4 int8 activations lm_head int8 gptq",
        "int8_weights + ngram_speculation gamma 4",
        "chunks",
    ]
    assert parse_scenario(scenario.model_dump(mode="json")) == scenario


def test_a_stack_is_all_of_its_techniques_and_lossy_if_one_is() -> None:
    (stack,) = with_variants(["int8_weights", "ngram_speculation", "continuous_batching"]).compared()
    plain = load_scenario("live-cpu").with_techniques(())
    assert not stack.lossless and stack.gain_metric == "output_tokens_per_s" and stack.needs_batch
    assert {one.name for one in stack.scenario(plain).techniques} == {one.name for one in stack.techniques}
    assert stack.compared_with(plain) == "plain engine"


def test_a_setting_is_compared_with_what_it_stands_beside() -> None:
    variant = {"name": "chunks", "beside": ["continuous_batching"], "set": {"engine.batching": "chunked_prefill"}}
    (one,) = with_variants(variant).compared()
    plain = load_scenario("live-cpu").with_techniques(())
    assert one.baseline(plain).setup.policy == "continuous" and one.baseline(plain).engine.batching is None
    assert one.scenario(plain).engine.batching == "chunked_prefill" and one.lossless
    assert one.compared_with(one.baseline(plain)) == "continuous batching"


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ({"name": "idle", "techniques": []}, "changes nothing"),
        ({"name": "odd", "set": {"engine.nothing": 1}}, "engine.nothing"),
        (["int8_weights", "w8a8"], "at once"),
        ("no_such", "no_such"),
    ],
)
def test_what_cannot_be_is_refused_when_the_scenario_is_read(variant: Any, said: str) -> None:
    with pytest.raises(MemboundError, match=said):
        with_variants(variant)


def test_two_of_a_name_are_refused() -> None:
    with pytest.raises(MemboundError, match="twice"):
        with_variants("int8_weights", "int8_weights")
