"""A budget bounds what decode reads and what a cache holds; choosing the tokens costs something too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from membound.roofline.applicable import check_applicable
from membound.roofline.cost import step_cost
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import get_hardware
from membound.roofline.memory import kv_bytes
from membound.roofline.models import get_model
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, KvEviction, KvQuantization, engine_setup
from membound.roofline.times.known import times_for

LLAMA = get_model("Llama-3.1-8B")
POLICIES = ("streaming", "h2o", "snapkv", "quest")
EVICTING = ("streaming", "h2o", "snapkv")
TOKEN_BYTES = 131_072  # 32 layers, K and V of 8 heads of 128 in 2 bytes


def setup_of(policy: str, budget: int = 1024, **options) -> EngineSetup:
    return engine_setup((KvEviction(policy=policy, budget=budget, **options),))


def read_bytes(setup: EngineSetup, shape: StepShape) -> dict[str, float]:
    operators = step_operators(LLAMA, setup, shape, 2.0)
    return {op.name: float(op.kv_bytes) * op.calls for op in operators if op.kind == "attention"}


@pytest.mark.parametrize("policy", POLICIES)
@given(context=st.integers(2, 100_000), budget=st.integers(128, 8192), batch=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_decode_attends_to_the_budget_at_most(policy, context, budget, batch):
    read = read_bytes(setup_of(policy, budget), StepShape.decode(float(batch), float(context)))
    assert read["attention"] == pytest.approx(batch * min(context, budget) * TOKEN_BYTES)


@pytest.mark.parametrize("policy", POLICIES)
@given(context=st.integers(1, 100_000), sequences=st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_what_evicts_holds_the_budget_and_pages_hold_everything_and_their_bounds(policy, context, sequences):
    held = float(kv_bytes(LLAMA, setup_of(policy), float(context * sequences), float(sequences)))
    if policy == "quest":  # the least and the largest key of 16: an eighth of the keys, a sixteenth of K and V
        assert held == pytest.approx(context * sequences * TOKEN_BYTES * (1 + 1 / 16))
    else:
        assert held == pytest.approx(min(context, 1024) * sequences * TOKEN_BYTES)


def test_choosing_reads_keys_again_where_the_policy_scores_and_bounds_where_it_has_pages():
    decode = StepShape.decode(1.0, 16_384.0)
    chosen = {policy: read_bytes(setup_of(policy), decode) for policy in POLICIES}
    assert chosen["streaming"].keys() == chosen["snapkv"].keys() == {"attention"}
    assert chosen["h2o"]["scores_again"] == 1024 * TOKEN_BYTES / 2
    assert chosen["quest"]["pages"] == 16_384 / 16 * TOKEN_BYTES
    prompt = StepShape.prefill(1.0, 4096.0)
    operators = {
        policy: {op.name: float(op.flops) for op in step_operators(LLAMA, setup_of(policy), prompt)}
        for policy in POLICIES
    }
    attended = operators["streaming"]["attention"]
    assert operators["h2o"]["scores_again"] == pytest.approx(attended / 2)  # the keys, without the values
    assert operators["snapkv"]["scores_again"] == pytest.approx(attended / 2 * 32 / 4096)  # by the last 32 queries
    assert "pages" not in operators["quest"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_is_faster_where_the_cache_binds_it_and_the_smaller_the_budget_the_faster(policy):
    times, shape = times_for(get_hardware("H100-SXM5")), StepShape.decode(32.0, 32_768.0)
    plain = float(step_cost(LLAMA, EngineSetup(), times, shape).time_s)
    taken = [float(step_cost(LLAMA, setup_of(policy, budget), times, shape).time_s) for budget in (4096, 2048, 1024)]
    assert plain > 1.5 * taken[0]
    assert taken == sorted(taken, reverse=True)


def test_fewer_tokens_in_fewer_bits_multiply_in_bytes():
    both = engine_setup((KvEviction(policy="streaming"), KvQuantization(format="fp8")))
    assert float(kv_bytes(LLAMA, both, 65_536.0)) == 1024 * TOKEN_BYTES / 2


def test_a_cache_in_fewer_bits_counts_its_scales_and_its_newest_tokens():
    def held(format: str, tokens: float) -> float:
        return float(kv_bytes(LLAMA, engine_setup((KvQuantization(format=format),)), tokens))

    vectors = 32 * 2 * 8  # of 128 channels, a token
    assert held("int8", 1.0) == vectors * (128 + 2)
    assert held("int4", 1.0) == vectors * (64 + 4)
    assert held("fp8", 1.0) == vectors * 128
    assert held("kivi2", 128.0) == 128 * TOKEN_BYTES
    assert held("kivi2", 1128.0) - held("kivi2", 128.0) == pytest.approx(1000 * vectors * 128 * 3 / 8)


def test_latents_are_not_evicted():
    for policy in ("snapkv", "quest"):
        with pytest.raises(MemboundError, match="latent attention"):
            check_applicable(get_model("DeepSeek-V3"), setup_of(policy))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "quest", "recent": 8}, "recent is 8, which quest does not have"),
        ({"policy": "streaming", "budget": 8, "sinks": 8}, "budget is 8, and 8 tokens stay"),
        ({"policy": "snapkv", "budget": 64, "recent": 100}, "budget is 64, and 100 tokens stay"),
        ({"policy": "quest", "budget": 20}, "less than two pages of 16"),
        ({"policy": "lru"}, "'streaming', 'h2o', 'snapkv' or 'quest'"),
        ({"budget": 1}, "greater than or equal to 2"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(options, sentence):
    with pytest.raises(ValidationError, match=sentence):
        KvEviction(**options)
