"""The busiest device of expert parallelism: its limits, what drawing experts at random shows, what balancing gains."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.chosen_experts import distinct_experts, expert_chances
from membound.roofline.cost import step_cost
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.expert_load import busiest_rank
from membound.roofline.hardware import get_hardware
from membound.roofline.hardware.links import hops
from membound.roofline.memory import weights_by_part
from membound.roofline.models import get_model
from membound.roofline.operators import message
from membound.roofline.parallel import Parallelism
from membound.roofline.scenario import load_scenario
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup, ExpertBalancing, ExpertOffload, engine_setup
from membound.roofline.times.known import times_for

H800 = times_for(get_hardware("H800-SXM5"))
DEEPSEEK = get_model("DeepSeek-V3")


def drawn(experts: int, top_k: int, ranks: int, tokens: int, skew: float, times: int = 200) -> tuple[float, float]:
    """Mean of the most pairs and of the most distinct experts of a device, over random choices and placements.

    Each token takes `top_k` different experts with their chances (systematic sampling in a random order).
    """
    generator = np.random.default_rng(7)
    chance = expert_chances(float(experts), float(top_k), skew)
    pairs, active = [], []
    for _ in range(times):
        count = np.zeros(experts)
        for _ in range(tokens):
            order = generator.permutation(experts)
            edges = np.concatenate(([0.0], np.cumsum(chance[order]))) - generator.random() + 1e-12
            count[order] += np.diff(np.floor(edges))
        placed = count[generator.permutation(experts)].reshape(ranks, -1)
        pairs.append(placed.sum(axis=1).max())
        active.append((placed > 0).sum(axis=1).max())
    return float(np.mean(pairs)), float(np.mean(active))


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "tokens", "skew"),
    [(256, 8, 32, 4, 0.0), (256, 8, 8, 64, 0.0), (8, 2, 8, 16, 0.0), (64, 6, 8, 32, 0.5), (256, 8, 32, 32, 1.0)],
)
def test_the_formula_is_what_random_choices_show(experts, top_k, ranks, tokens, skew):
    pairs, active = drawn(experts, top_k, ranks, tokens, skew)
    found = busiest_rank(experts, top_k, ranks, float(tokens), skew)
    assert found.pairs == pytest.approx(pairs, rel=0.07)
    assert found.active == pytest.approx(active, rel=0.1)


def test_a_single_token_gives_the_busiest_device_one_pair_or_few():
    assert busiest_rank(256, 8, 256, 1.0).pairs == pytest.approx(1.0, abs=0.05)
    assert busiest_rank(256, 8, 128, 1.0).pairs == pytest.approx(1.15, abs=0.1)  # two of eight meet in one of five


def test_with_many_tokens_equal_experts_are_evenly_loaded():
    for ranks in (2, 8, 64):
        found = busiest_rank(256, 8, ranks, 1e9)
        assert found.pairs == pytest.approx(8e9 / ranks, rel=1e-3)
        assert found.active == pytest.approx(256 / ranks)


def test_experts_that_all_tokens_take_leave_nothing_to_chance():
    for tokens in (1.0, 7.0, 1000.0):
        found = busiest_rank(8, 8, 4, tokens)
        assert found.pairs == pytest.approx(2 * tokens, rel=1e-6)
        assert found.active == pytest.approx(2.0, rel=1e-6)


def test_where_one_expert_is_all_that_is_chosen_its_device_has_all_pairs():
    """The largest imbalance that there is: the busiest of R devices has R times the mean."""
    assert busiest_rank(64, 1, 16, 1e6, 4.0).pairs > 0.92 * 1e6
    assert busiest_rank(64, 1, 16, 1e6, 30.0).pairs == pytest.approx(1e6, rel=1e-3)


configs = st.tuples(
    st.sampled_from([(8, 2), (64, 6), (256, 8)]), st.sampled_from([2, 4, 8]), st.sampled_from([0.0, 0.4, 1.0])
)


@given(config=configs, tokens=st.floats(0.1, 1e6), more=st.floats(1.0, 3.0), balanced=st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_busiest_device_has_its_share_or_more_never_all_and_more_with_more_tokens(config, tokens, more, balanced):
    (experts, top_k), ranks, skew = config
    redundant = ranks if balanced else None
    now = busiest_rank(experts, top_k, ranks, tokens, skew, redundant)
    later = busiest_rank(experts, top_k, ranks, tokens * more, skew, redundant)
    slots = (experts + (redundant or 0)) / ranks
    assert tokens * top_k / ranks <= now.pairs * (1 + 1e-9) and now.pairs <= tokens * min(top_k, slots) * (1 + 1e-9)
    read = float(distinct_experts(float(experts), float(top_k), tokens, skew))
    assert read / ranks <= now.active * (1 + 1e-9) and now.active <= slots * (1 + 1e-9)
    assert later.pairs >= now.pairs * (1 - 1e-9) and later.active >= now.active * (1 - 1e-9)


def test_many_steps_at_once_equal_each_alone():
    tokens = np.array([0.0, 0.5, 1.0, 30.0, 1e4, 1e10])
    for skew, redundant in ((0.0, None), (0.7, None), (0.7, 32)):
        together = busiest_rank(256, 8, 32, tokens, skew, redundant)
        alone = [busiest_rank(256, 8, 32, float(t), skew, redundant) for t in tokens]
        np.testing.assert_allclose(together.pairs, [one.pairs for one in alone], rtol=1e-12)
        np.testing.assert_allclose(together.active, [one.active for one in alone], rtol=1e-12)


def test_imbalance_grows_with_skew_and_with_the_number_of_devices():
    """LMSYS on 96 H100: imbalance grows with the ranks, so that balancing gains more in decode than in prefill."""
    by_skew = [busiest_rank(256, 8, 32, 1e5, skew).pairs for skew in (0.0, 0.2, 0.4, 0.8, 1.2)]
    assert all(more > less for less, more in itertools.pairwise(by_skew))
    by_ranks = [busiest_rank(256, 8, ranks, 1e5, 0.5).pairs * ranks for ranks in (2, 8, 32, 128)]
    assert all(more > less for less, more in itertools.pairwise(by_ranks))


def test_the_redundant_experts_that_deepseek_publishes_even_out_a_skewed_load():
    """32 copies at EP 32 and EP 144 (open-infra-index, day 6): 9 and 2 experts a device, which balance most skews."""
    mean = 1e5 * 8 / 32
    for skew in (0.3, 0.5, 0.8):
        plain = busiest_rank(256, 8, 32, 1e5, skew)
        packed, copied = (busiest_rank(256, 8, 32, 1e5, skew, redundant) for redundant in (0, 32))
        assert mean <= copied.pairs < 1.05 * mean < plain.pairs
        assert copied.pairs < packed.pairs < plain.pairs
        assert copied.active == pytest.approx(9.0) and plain.active == pytest.approx(8.0)
    assert busiest_rank(256, 8, 144, 1e6, 0.5, 32).active == pytest.approx(2.0)


def test_more_copies_never_make_the_busiest_device_busier():
    """But for the last percent, which packing leaves."""
    pairs = [busiest_rank(256, 8, 32, 1e5, 0.9, redundant).pairs for redundant in (0, 32, 64, 128, 256)]
    assert all(more <= less * 1.01 for less, more in itertools.pairwise(pairs))


# --- in a step --------------------------------------------------------------------------------------------------------


def spread(ep: int, skew: float, *techniques) -> EngineSetup:
    return replace(engine_setup(techniques), parallel=Parallelism(dp=ep, ep=ep), expert_skew=skew)


def seconds(setup: EngineSetup, tokens: float) -> float:
    return float(step_cost(DEEPSEEK, setup, H800, StepShape.decode(tokens, 1000.0)).time_s)


def test_balancing_gains_where_experts_are_unequal_and_nothing_where_they_are_equal():
    even, uneven = (
        seconds(spread(32, s), 8192.0) / seconds(spread(32, s, ExpertBalancing()), 8192.0) for s in (0.0, 0.5)
    )
    assert 0.95 < even < 1.02
    assert uneven > 1.3


def test_a_skewed_step_takes_longer_and_one_device_alone_does_not_care_about_ranks():
    assert seconds(spread(32, 0.6), 8192.0) > seconds(spread(32, 0.3), 8192.0) > seconds(spread(32, 0.0), 8192.0)


def test_copies_take_memory_on_each_device():
    plain, copied = spread(32, 0.0), spread(32, 0.0, ExpertBalancing(redundant_experts=32))
    held = weights_by_part(DEEPSEEK, plain)["experts"]
    assert weights_by_part(DEEPSEEK, copied)["experts"] == pytest.approx(held * 9 / 8)


@pytest.mark.parametrize(
    ("model", "parallel", "redundant", "sentence"),
    [
        ("Llama-3.1-8B", Parallelism(tp=2), 32, "expert_balancing places routed experts, and 'Llama-3.1-8B' has none"),
        ("DeepSeek-V3", Parallelism(tp=8), 32, "parallel.ep is 1; give more, or leave it out"),
        ("DeepSeek-V3", Parallelism(dp=32, ep=32), 5, "does not divide the 256 experts and 5 redundant ones"),
        ("DeepSeek-V3", Parallelism(dp=144, ep=144), None, "does not divide the 256 experts of 'DeepSeek-V3'"),
    ],
)
def test_what_cannot_be_balanced_is_refused_in_one_sentence(model, parallel, redundant, sentence):
    techniques = () if redundant is None else (ExpertBalancing(redundant_experts=redundant),)
    with pytest.raises(MemboundError, match=sentence) as caught:
        check_parallel(get_model(model), replace(engine_setup(techniques), parallel=parallel))
    assert "\n" not in str(caught.value)


def test_deepseeks_decode_divides_only_with_its_redundant_experts():
    check_parallel(DEEPSEEK, spread(144, 0.0, ExpertBalancing(redundant_experts=32)))


def test_copies_and_offload_exclude_each_other():
    with pytest.raises(MemboundError, match="leave one of them out"):
        engine_setup((ExpertOffload(), ExpertBalancing()))


# --- between nodes ----------------------------------------------------------------------------------------------------


@given(nodes=st.integers(2, 18), copies=st.floats(1, 16), sent=st.floats(1, 1e9))
@settings(max_examples=40)
def test_copies_of_a_token_cross_the_network_once_a_node(nodes, copies, sent):
    """Of c copies to n nodes at random n (1 - (1 - 1/n)^c) go to different ones."""
    hardware = get_hardware("H100-SXM5")
    inside, between = hops(hardware, "alltoall", sent, 8 * nodes, copies)
    devices = 8 * nodes
    assert inside.message_bytes == pytest.approx(sent / copies * devices * (1 - (1 - 1 / devices) ** copies))
    assert between.beyond_node
    assert between.message_bytes == pytest.approx(sent / copies * nodes * (1 - (1 - 1 / nodes) ** copies))
    assert sent / copies * (1 - 1e-9) <= between.message_bytes <= inside.message_bytes * (1 + 1e-9) <= sent * (1 + 2e-9)
    assert hops(hardware, "alltoall", sent, 8 * nodes)[1].message_bytes == pytest.approx(sent)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "taken"), [(8, 4), (8, 3)])
def test_a_token_goes_to_the_nodes_of_its_groups_of_experts(nodes, groups, taken):
    """The nodes that a router reaches which draws groups, then 8 of their experts: an average over many tokens."""
    rng = np.random.default_rng(7)
    experts = np.arange(256)
    reached = []
    for _ in range(4000):
        chosen = rng.choice(groups, taken, replace=False)
        drawn = rng.choice(experts[np.isin(experts // (256 // groups), chosen)], 8, replace=False)
        reached.append(len(set(drawn // (256 // nodes))))
    _, between = hops(get_hardware("H100-SXM5"), "alltoall", 8.0, 8 * nodes, 8.0, groups=(groups, taken))
    assert between.message_bytes == pytest.approx(np.mean(reached), rel=0.03)
    free = hops(get_hardware("H100-SXM5"), "alltoall", 8.0, 8 * nodes, 8.0)[1]
    assert between.message_bytes < free.message_bytes


def test_groups_are_those_of_the_router_and_leave_decode_as_it_is():
    """DeepSeek-V3's router takes 4 of 8 groups; kernels for decode send each copy, wherever it goes."""
    for shape in (StepShape.prefill(32.0, 1024.0), StepShape.decode(4096.0, 1024.0)):
        setup = spread(128, 0.0)
        sent = [op.collective for op in step_operators(DEEPSEEK, setup, shape) if op.collective]
        assert {one.groups for one in sent} == {(8, 4)}
    one = sent[0]
    free = hops(get_hardware("H100-SXM5"), one.operation, one.message_bytes, one.ranks, one.copies)
    limited = hops(get_hardware("H100-SXM5"), one.operation, one.message_bytes, one.ranks, one.copies, groups=(8, 4))
    assert [hop.message_bytes for hop in free] == pytest.approx([hop.message_bytes for hop in limited])


def test_prompts_send_a_token_to_a_node_once_and_decode_sends_each_copy():
    for shape, copies in ((StepShape.prefill(32.0, 1024.0), 8.0), (StepShape.decode(4096.0, 1024.0), 1.0)):
        sent = [op.collective for op in step_operators(DEEPSEEK, spread(32, 0.0), shape) if op.collective]
        assert {one.operation for one in sent} == {"alltoall"} and {float(one.copies) for one in sent} == {copies}


# DeepEP's docs/legacy.md, H800 and 400 Gb/s: microseconds of dispatch in fp8 (with a scale for 128 values) and of
# combine in bf16, of 128 tokens a device with 8 experts each.
LOW_LATENCY_US = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369)}
# The same page and DeepEP with NCCL on H100: 4,096 tokens a device, GB/s of what goes to each node, the own one too.
THROUGHPUT_GB_S = {("H800-SXM5", 32): 58, ("H800-SXM5", 64): 51, ("H100-SXM5", 16): 79.7, ("H100-SXM5", 32): 62.9}


@pytest.mark.parametrize("ep", LOW_LATENCY_US)
def test_messages_of_decode_take_about_what_deepep_published(ep):
    for bytes_a_token, published_us in zip((7168 * 33 / 32, 7168 * 2), LOW_LATENCY_US[ep], strict=True):
        sent = message("experts", 1, "alltoall", 128.0 * 8 * bytes_a_token, ep)
        assert float(H800.of(sent, 0.0).time_s) * 1e6 == pytest.approx(published_us, rel=0.2)


@pytest.mark.parametrize(("device", "ep"), THROUGHPUT_GB_S)
def test_messages_of_prompts_reach_about_what_deepep_published(device, ep):
    nodes, a_token = ep // 8, 7168.0 * 33 / 32
    sent = message("dispatch", 1, "alltoall", 4096 * 8 * a_token, ep, copies=8.0)
    seconds = float(times_for(get_hardware(device)).of(sent, 0.0).time_s)
    logical = 4096 * a_token * nodes * (1 - (1 - 1 / nodes) ** 8)
    assert logical / seconds / 1e9 == pytest.approx(THROUGHPUT_GB_S[device, ep], rel=0.12)


# --- measured loads ---


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokens", [1.0, 16.0, 300.0])
def test_measured_loads_that_are_those_of_a_skew_read_as_many_experts(skew, tokens):
    loads = tuple(1e6 * expert_chances(64.0, 6.0, 0.0) * np.arange(1.0, 65.0) ** -skew)
    assert distinct_experts(64.0, 6.0, tokens, loads) == pytest.approx(
        float(distinct_experts(64.0, 6.0, tokens, skew)), rel=1e-3
    )


def test_the_device_with_the_popular_experts_is_waited_for():
    """Loads are placed in their order: the same loads, spread over devices, leave nobody to wait for."""
    clustered, spread = (1.0,) * 8 + (9.0,) * 8, (1.0, 9.0) * 8
    many = 1e6
    for loads, share in ((clustered, 9.0 / 10.0), (spread, 0.5)):
        assert busiest_rank(16, 2, 2, many, loads).pairs == pytest.approx(2.0 * many * share, rel=0.01)
    balanced = busiest_rank(16, 2, 2, many, clustered, redundant=0)
    assert balanced.pairs == pytest.approx(many, rel=0.02)


def test_a_scenario_gives_measured_loads_and_they_fit_its_model():
    asked = load_scenario("plan-70b").with_values({"model": "Mixtral-8x7B", "sweep": [], "parallel.tp": 2})
    even, uneven = (asked.with_value("expert_loads", loads) for loads in ([5] * 8, [70, 10, 5, 5, 4, 3, 2, 1]))
    shape, h100 = StepShape.decode(4.0, 1000.0), times_for(get_hardware("H100-SXM5"))
    times_s = [step_cost(get_model("Mixtral-8x7B"), one.setup, h100, shape).time_s for one in (asked, even, uneven)]
    assert times_s[1] == pytest.approx(times_s[0]) and times_s[2] < 0.95 * times_s[1]
    with pytest.raises(MemboundError, match=r"has 3 loads.*8 experts"):
        step_cost(get_model("Mixtral-8x7B"), asked.with_value("expert_loads", [1, 2, 3]).setup, h100, shape)
    with pytest.raises(MemboundError, match="expert_skew and expert_loads"):
        uneven.with_value("expert_skew", 0.5)
    with pytest.raises(MemboundError, match="expert_loads"):
        asked.with_value("expert_loads", [1, -2])


def experts_of(parallel: Parallelism, tokens: float):
    setup = EngineSetup(parallel=parallel)
    step = step_operators(get_model("Qwen3-235B-A22B"), setup, StepShape.decode(tokens, 1000.0))
    return next(op.experts for op in step if op.kind == "moe")


def test_a_device_has_the_rows_of_other_devices_experts_only_where_nobody_sends_them_there():
    alone, groups = experts_of(Parallelism(), 64.0), experts_of(Parallelism(tp=8, ep=8), 64.0)
    assert alone.present == alone.pairs == groups.present == 64 * 8
    assert groups.pairs < groups.present
    sent = experts_of(Parallelism(dp=8, ep=8), 64.0)
    assert sent.present == pytest.approx(sent.pairs)


def test_an_engine_that_keeps_those_rows_takes_longer_with_them():
    hopper, blackwell = get_hardware("H100-SXM5"), get_hardware("B200-SXM")
    load = experts_of(Parallelism(tp=8, ep=8), 512.0)
    operator = next(
        op
        for op in step_operators(
            get_model("Qwen3-235B-A22B"), EngineSetup(parallel=Parallelism(tp=8, ep=8)), StepShape.decode(512.0, 1000.0)
        )
        if op.kind == "moe"
    )
    few = replace(operator, experts=replace(load, present=load.pairs))
    for hardware, profile, longer in ((hopper, "vllm", True), (blackwell, "vllm", False), (hopper, "sglang", False)):
        times = times_for(hardware, profile)
        assert (times.of(operator, 0.0).time_s > times.of(few, 0.0).time_s) == longer
