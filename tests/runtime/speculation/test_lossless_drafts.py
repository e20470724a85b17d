"""Whoever drafts, chain or tree, the greedy tokens are those of the plain engine."""

from __future__ import annotations

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware

ALONE = {
    "first layers": {"name": "self_speculation", "layers": 3, "gamma": 3},
    "the model itself": {"name": "draft_model_speculation", "gamma": 3},
    "a quantized copy": {"name": "draft_model_speculation", "gamma": 4, "format": "int8"},
    "Medusa": {"name": "medusa", "heads": 3, "tree_size": 12},
    "EAGLE chain": {"name": "eagle", "depth": 3, "tree_size": 3},
    "EAGLE tree": {"name": "eagle", "depth": 3, "tree_size": 10},
}
ENGINES = {
    "plenty": {},
    "preempted": {"num_blocks": 34},
    "chunks": {"batching": "chunked_prefill", "max_batched_tokens": 50},
    "reserved": {"reserved_tokens": 88},
    "prompts first": {"batching": "prefill_first"},
}


def technique(fields, model):
    return fields | ({"draft": str(model)} if fields["name"] == "draft_model_speculation" else {})


@pytest.fixture(scope="module")
def plain(runtime, scenario_of):
    return runtime.run(scenario_of(), get_hardware("H100-SXM5")).outputs


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE)
def test_every_drafter_leaves_the_greedy_tokens(runtime, scenario_of, model, plain, fields, batch):
    result = runtime.run(scenario_of(technique(fields, model), batch=batch), get_hardware("H100-SXM5"))
    assert result.outputs == plain
    assert result.steps["drafted"].sum() > 0


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", ["a quantized copy", "EAGLE tree"])
def test_no_way_of_serving_changes_them(runtime, scenario_of, model, plain, name, engine):
    result = runtime.run(scenario_of(technique(ALONE[name], model), engine=engine), get_hardware("H100-SXM5"))
    assert result.outputs == plain
    assert (result.summary.preemptions > 0) == (engine.get("num_blocks") == 34)


def test_a_model_that_drafts_for_itself_is_always_right(runtime, scenario_of, model, plain):
    fields = technique(ALONE["the model itself"], model)
    result = runtime.run(scenario_of(fields), get_hardware("H100-SXM5"))
    assert result.outputs == plain
    assert result.steps["accepted"].sum() == result.steps["drafted"].sum()


def test_deeper_first_layers_are_right_more_often(runtime, scenario_of):
    def share(layers):
        chosen = scenario_of({"name": "self_speculation", "layers": layers, "gamma": 2})
        steps = runtime.run(chosen, get_hardware("H100-SXM5")).steps
        return steps["accepted"].sum() / steps["drafted"].sum()

    assert share(3) > share(1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "medusa", "heads": 4, "tree_size": 64}, "field 'tree_size' of medusa is 64"),
        ({"name": "self_speculation", "layers": 4}, "field 'layers' of self_speculation is 4"),
        ({"name": "draft_model_speculation", "draft": "SmolLM2-135M"}, "same tokenizer"),
        ({"name": "eagle", "head": "/nowhere.safetensors"}, "draft head '/nowhere.safetensors' cannot be read"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_in_one_sentence(runtime, scenario_of, fields, sentence):
    with pytest.raises(MemboundError, match=sentence):
        runtime.run(scenario_of(fields), get_hardware("H100-SXM5"))
