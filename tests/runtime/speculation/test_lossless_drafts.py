"""Whoever drafts, chain or tree, the greedy tokens are those of the plain engine."""

from __future__ import annotations

import json

import pytest
from scripted import ScriptedClock

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.simulator.scheduling.request import draft_depth

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


@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE)
def test_what_is_guessed_does_not_depend_on_who_shares_the_step(runtime, scenario_of, model, fields):
    """A drafter that read another sequence's hidden state would be right less often, and nothing else would tell."""
    drafting, device = technique(fields, model), get_hardware("H100-SXM5")
    alone, shared = (runtime.run(scenario_of(drafting, batch=batch), device).steps for batch in (1, 4))
    assert alone["accepted"].sum() == shared["accepted"].sum() > 0


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


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_a_module_for_multi_token_prediction_leaves_the_greedy_tokens(runtime, scenario_of, tmp_path):
    """The module has the structure of the model's own last layer: latent attention and experts."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    model = str(tmp_path / "config.json")
    plain = runtime.run(scenario_of(model=model), get_hardware("H100-SXM5"))
    drafted = runtime.run(scenario_of({"name": "mtp", "gamma": 2}, model=model), get_hardware("H100-SXM5"))
    assert drafted.outputs == plain.outputs
    assert drafted.steps["drafted"].sum() > 0


class CostlyGuesses:
    """Runs the real executor and says that each step took 10 ms and as much again for each of its guesses."""

    def __init__(self, executor):
        self.executor = executor

    def run(self, step, sequences):
        guesses = sum(draft_depth(work) for work in step.work)
        return self.executor.run(step, sequences)._replace(time_s=0.01 + 0.01 * guesses)


def test_adaptive_drafts_leave_the_greedy_tokens_and_stop_where_they_are_never_right(runtime, scenario_of, plain):
    fields = {"name": "medusa", "heads": 3, "tree_size": 12, "adaptive": True}
    result = runtime.run(scenario_of(fields), get_hardware("H100-SXM5"), clock=ScriptedClock(), wrap=CostlyGuesses)
    assert result.outputs == plain
    assert (result.steps["drafted"] == 0).sum() > (result.steps["drafted"] > 0).sum()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "medusa", "heads": 4, "tree_size": 64}, "field 'tree_size' of medusa is 64"),
        ({"name": "self_speculation", "layers": 4}, "field 'layers' of self_speculation is 4"),
        ({"name": "draft_model_speculation", "draft": "SmolLM2-135M"}, "give a smaller model"),
        ({"name": "eagle", "head": "/nowhere.safetensors"}, "draft head '/nowhere.safetensors' cannot be read"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_in_one_sentence(runtime, scenario_of, fields, sentence):
    with pytest.raises(MemboundError, match=sentence):
        runtime.run(scenario_of(fields), get_hardware("H100-SXM5"))
