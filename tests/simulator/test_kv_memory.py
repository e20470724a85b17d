"""KV memory holds what it can, wastes what it must, and finds again what it has seen."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import get_hardware
from membound.roofline.hardware.links import HOST_COPY_SHARE
from membound.roofline.memory import kv_bytes
from membound.roofline.models.files import resolve_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.deployment import deployment_of
from membound.simulator.run import deploy, run
from membound.simulator.scheduling.build import build_scheduler
from membound.simulator.scheduling.kv_memory import kv_memory
from membound.simulator.scheduling.prefix import PrefixChain, blocks_of, leading
from membound.simulator.scheduling.prefix_cache import PrefixCache
from membound.simulator.scheduling.request import Request

SESSIONS = {
    "kind": "sessions",
    "tokens": {"kind": "uniform", "low": 20, "high": 100},
    "turns": {"kind": "fixed", "count": 4},
    "think": {"kind": "exponential", "mean_s": 2.0},
    "system_tokens": 400,
}


def scenario(
    model: str = "Llama-3.1-8B", hardware: str = "H100-SXM5", prompts: dict | None = None, **engine
) -> Scenario:
    return parse_scenario(
        {
            "name": "kv",
            "model": model,
            "hardware": hardware,
            "engine": {"max_num_seqs": 32, "batching": "chunked_prefill"} | engine,
            "workload": {
                "arrivals": {"kind": "poisson", "rate_rps": 10.0},
                "requests": 200,
                "prompts": prompts or {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 10, "high": 400}},
                "output_tokens": {"kind": "uniform", "low": 8, "high": 100},
                "seed": 2,
            },
        }
    )


@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        ("Llama-3.1-8B", "H100-SXM5"),
        ("gemma-3-12b", "H100-SXM5"),
        ("Mistral-7B-v0.1", "A100-SXM4-80GB"),
        ("mamba-2.8b", "L4"),
    ],
)
def test_blocks_and_what_sequences_take_besides_fill_the_memory(model, hardware):
    """As many sequences of the full context as the blocks hold take no more bytes than there are, and nearly all."""
    chosen, spec = scenario(model, hardware, max_num_seqs=1_000_000), resolve_model(model)
    memory = kv_memory(chosen, spec, get_hardware(hardware).memory_bytes)
    spare = Footprint.of(spec, chosen.setup, chosen.limits).room(get_hardware(hardware).memory_bytes)
    context = spec.max_context
    one = float(kv_bytes(spec, chosen.setup, float(context), 1.0))
    fitting = min(memory.num_blocks // memory.pools()[0].blocks_for(context), memory.seats)
    assert fitting * one <= spare * (1 + 1e-9)
    assert (fitting + 1) * one > spare


DRAFTERS = {
    "nobody": (),
    "n-grams": ({"name": "ngram_speculation"},),
    "a model": ({"name": "draft_model_speculation"},),
    "a head": ({"name": "eagle"},),
    "heads": ({"name": "medusa"},),
}


def seated(model: str, hardware: str, total: int, techniques: tuple = ()) -> tuple[int, float]:
    """Sequences of `total` tokens that fit at once, for the simulator and for closed forms."""
    chosen = scenario(model, hardware, max_num_seqs=1_000_000, block_size=1).with_techniques(techniques)
    chosen = chosen.with_value("workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 90}})
    chosen = chosen.with_value("workload.output_tokens", {"kind": "fixed", "tokens": total - 90})
    deployment, _ = deploy(chosen)
    memory = deployment.memory
    closed = deployment_of(chosen, deployment.model, deployment.times.hardware).largest_batch(total)
    return min(memory.num_blocks // memory.pools()[0].blocks_for(total), memory.seats), closed


@pytest.mark.parametrize("total", [100, 1000, 7900])
@pytest.mark.parametrize(
    ("model", "hardware", "drafts"),
    [
        *(("Llama-3.1-8B", "H100-SXM5", drafts) for drafts in DRAFTERS),
        ("Mistral-7B-v0.1", "L4", "nobody"),
        ("gemma-3-12b", "H100-SXM5", "nobody"),
        ("DeepSeek-V2-Lite", "A100-SXM4-80GB", "nobody"),
        ("mamba-2.8b", "L4", "nobody"),
    ],
)
def test_closed_forms_and_the_simulator_seat_the_same_number(model, hardware, drafts, total):
    techniques = scenario().model_dump(mode="json") | {"techniques": DRAFTERS[drafts]}
    simulated, closed = seated(model, hardware, total, parse_scenario(techniques).techniques)
    assert simulated == pytest.approx(closed, abs=1), "a block of what does not grow may be filled in part"


def test_a_window_that_no_request_fills_costs_what_a_request_has():
    """Mistral 7B v0.1 has windows of 4096 tokens in every layer: of 500 tokens eight times as many fit, and more."""
    short, _ = seated("Mistral-7B-v0.1", "L4", 500)
    window, _ = seated("Mistral-7B-v0.1", "L4", 4096)
    long, _ = seated("Mistral-7B-v0.1", "L4", 30_000)
    assert short == pytest.approx(window * 4096 / 500, rel=0.1) and window == long


@pytest.mark.parametrize("drafts", [name for name in DRAFTERS if name != "nobody"])
def test_a_drafter_takes_the_place_of_sequences(drafts):
    """Its weights once and its cache for each; n-grams have neither. `predict` counts both too."""
    document = scenario().model_dump(mode="json")
    plain = parse_scenario(document)
    drafting = parse_scenario(document | {"techniques": DRAFTERS[drafts]})
    model, total = resolve_model("Llama-3.1-8B"), 1000
    alone, both = (Footprint.of(model, one.setup) for one in (plain, drafting))
    weights = both.weights_bytes - alone.weights_bytes
    cache = both.sequence_bytes(total) - alone.sequence_bytes(total)
    assert (weights == 0, cache == 0) == (drafts == "n-grams", drafts in ("n-grams", "heads"))
    lost = (
        seated("Llama-3.1-8B", "H100-SXM5", total)[0]
        - seated("Llama-3.1-8B", "H100-SXM5", total, drafting.techniques)[0]
    )
    room = alone.usable_bytes(get_hardware("H100-SXM5").memory_bytes)
    expected = (room - alone.weights_bytes) / alone.sequence_bytes(total)
    expected -= (room - both.weights_bytes) / both.sequence_bytes(total)
    assert lost == pytest.approx(expected, abs=1)
    points = [OperatingPoint.of(one, batch=8, context=total, phase="decode").memory for one in (plain, drafting)]
    assert points[1].weights_bytes - points[0].weights_bytes == pytest.approx(weights)
    assert points[1].kv_bytes - points[0].kv_bytes == pytest.approx(8 * cache)


def test_a_smaller_footprint_holds_more():
    plain = kv_memory(scenario(), resolve_model("Llama-3.1-8B"), 80e9)
    fp8 = scenario().model_dump(mode="json") | {"techniques": [{"name": "kv_quantization", "format": "fp8"}]}
    quantized = kv_memory(parse_scenario(fp8), resolve_model("Llama-3.1-8B"), 80e9)
    assert quantized.num_blocks == pytest.approx(2 * plain.num_blocks, rel=0.02)
    deepseek = resolve_model("DeepSeek-V2-Lite")
    latent = kv_memory(scenario("DeepSeek-V2-Lite"), deepseek, 80e9)
    assert latent.block_bytes < 0.5 * plain.block_bytes


def test_waste_is_half_a_block_with_pages_and_the_rest_of_the_reservation_without():
    """Kwon et al., SOSP 2023, section 3: reserved memory is mostly empty; paged memory wastes less than a block."""
    paged, reserved = run(scenario(block_size=16)), run(scenario(reserved_tokens=2048))
    assert paged.summary.kv_waste < 16 / 2 / 150
    held = np.sum(reserved.steps["held_tokens"] * reserved.steps["time_s"])
    taken = np.sum(reserved.steps["blocks_used"] * 16 * reserved.steps["time_s"])
    assert reserved.summary.kv_waste == pytest.approx(1 - held / taken) and reserved.summary.kv_waste > 0.8
    assert run(scenario(block_size=64)).summary.kv_waste > paged.summary.kv_waste


def test_reserving_the_maximum_holds_fewer_sequences_than_paging():
    tight = {"num_blocks": 256, "block_size": 16}
    paged, reserved = run(scenario(**tight)), run(scenario(**tight, reserved_tokens=1024))
    assert reserved.steps["sequences"].max() <= 256 * 16 // 1024
    assert paged.steps["sequences"].max() > 2 * reserved.steps["sequences"].max()
    assert reserved.summary.preemptions == 0, "what is reserved never runs out"


@pytest.mark.parametrize(
    ("model", "hardware", "remedy"),
    [
        ("Llama-3.1-405B", "H100-SXM5", {"parallel": {"tp": 16}}),
        ("Falcon-180B", "L4", {"parallel": {"tp": 8, "pp": 4}}),
        ("Gemma-3-27B", "L4", {"techniques": [{"name": "weight_quantization", "format": "int4"}]}),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would_hold_it(model, hardware, remedy):
    """The fewest devices, by doublings, and the widest narrower format; half as many devices do not."""
    with pytest.raises(MemboundError, match="does not fit: its weights take") as caught:
        run(scenario(model, hardware).with_value("workload.requests", 3))
    document = scenario(model, hardware).with_value("workload.requests", 3).model_dump(mode="json")
    assert run(parse_scenario(document | remedy)).summary.completed == 3
    if degrees := remedy.get("parallel"):
        assert ", ".join(f"parallel.{name} {value}" for name, value in degrees.items()) in str(caught.value)
        with pytest.raises(MemboundError, match="does not fit"):
            run(parse_scenario(document | {"parallel": degrees | {"tp": degrees["tp"] // 2}}))
    else:
        assert "4-bit weights (weight_quantization)" in str(caught.value)


RESERVED = (2048, "pow2", "oracle", None)


def test_the_less_a_request_reserves_the_more_of_the_memory_in_use_holds_tokens():
    """Orca (Max), (Pow2), (Oracle) and paging, in the order of Kwon et al., SOSP 2023, figure 2."""
    waste = [run(scenario(reserved_tokens=reserved)).summary.kv_waste for reserved in RESERVED]
    assert all(more > less for more, less in itertools.pairwise(waste))


def test_the_less_a_request_reserves_the_more_are_served_together():
    """Figure 13 of the same: 7.0, 9.8, 13.6 and 30.4 requests on average."""
    tight = {"num_blocks": 256, "block_size": 16}
    together = []
    for reserved in RESERVED:
        steps = run(scenario(**tight, reserved_tokens=reserved).with_value("workload.arrivals.rate_rps", 500.0)).steps
        together.append(steps["sequences"] @ steps["time_s"] / steps["time_s"].sum())
    assert all(more > less for less, more in itertools.pairwise(together))


@pytest.mark.parametrize("reserved", ["pow2", "oracle"])
def test_what_is_reserved_is_what_the_rule_says_and_never_runs_out(reserved):
    """25 tokens of output reserve 32 in powers of two (section 6.1 of the same), and 25 where they are known."""
    one = scenario(reserved_tokens=reserved, max_num_seqs=1, block_size=1)
    one = one.with_value("workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 10}})
    result = run(one.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 25}))
    np.testing.assert_allclose(result.steps["blocks_used"], 10 + 32 if reserved == "pow2" else 10 + 25)
    crowded = run(scenario(reserved_tokens=reserved, num_blocks=64))
    assert crowded.summary.preemptions == 0 and crowded.summary.completed == 200


def test_a_buddy_allocator_gives_chunks_of_a_power_of_two():
    one = scenario(reserved_tokens="oracle", kv_allocator="buddy", max_num_seqs=1, block_size=1)
    one = one.with_value("workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 40}})
    result = run(one.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 25}))
    np.testing.assert_allclose(result.steps["blocks_used"], 128)
    for reserved in RESERVED[:3]:
        tight = scenario(reserved_tokens=reserved, num_blocks=256).with_value("workload.arrivals.rate_rps", 100.0)
        blocks, chunks = run(tight), run(tight.with_value("engine.kv_allocator", "buddy"))
        assert chunks.summary.completed == 200 and chunks.summary.preemptions == 0
        assert chunks.summary.kv_waste >= blocks.summary.kv_waste - 1e-9
        assert chunks.steps["sequences"].max() <= blocks.steps["sequences"].max()


def test_chunks_need_a_reservation():
    with pytest.raises(MemboundError, match="kv_allocator is 'buddy', which holds what is reserved"):
        scenario(kv_allocator="buddy")


def test_a_reservation_is_never_longer_than_the_model_takes():
    longest = scenario("OPT-13B", "A100-SXM4-80GB", reserved_tokens="pow2", block_size=1, max_batched_tokens=8192)
    longest = longest.with_value("workload.prompts", {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 1000}})
    longest = longest.with_value("workload.output_tokens", {"kind": "fixed", "tokens": 1040})
    result = run(longest.with_value("workload.requests", 1))
    assert result.summary.completed == 1
    np.testing.assert_allclose(result.steps["blocks_used"], 2048)


def test_a_found_prefix_changes_when_answers_come_and_not_what_they_are():
    plain, cached = run(scenario(prompts=SESSIONS)), run(scenario(prompts=SESSIONS, prefix_caching=True))
    for name in ("prompt_tokens", "output_tokens", "completed"):
        np.testing.assert_array_equal(plain.requests[name], cached.requests[name])
    assert cached.summary.prefix_hit_rate > 0.6 and plain.summary.prefix_hit_rate is None
    computed = [result.steps["tokens"] @ result.steps["steps"] for result in (plain, cached)]
    assert computed[0] - computed[1] == cached.steps["cached_tokens"].sum()
    assert cached.summary.ttft_s.mean < plain.summary.ttft_s.mean
    assert 0 <= cached.summary.kv_waste < 0.1, "a token in a block that several share is held once"


@settings(max_examples=15, deadline=None)
@given(
    num_blocks=st.integers(45, 140),
    seqs=st.sampled_from([2, 8, 32]),
    groups=st.integers(1, 3),
    swap=st.booleans(),
    seed=st.integers(0, 99),
)
@example(num_blocks=60, seqs=32, groups=1, swap=False, seed=2)
def test_no_request_finds_more_than_its_prompt_however_often_it_is_preempted(num_blocks, seqs, groups, swap, seed):
    """What is found again after a preemption is the request's own, and no part of the prompt that others computed."""
    prompts = SESSIONS | {"groups": groups, "turns": {"kind": "fixed", "count": 2}}
    engine = {"num_blocks": num_blocks, "max_num_seqs": seqs, "prefix_caching": True}
    engine |= {"preemption": "swap", "host_kv_gib": 0.01} if swap else {}
    result = run(scenario(prompts=prompts, **engine).with_value("workload.seed", seed))
    found, given_tokens = result.requests["cached_tokens"], result.requests["prompt_tokens"]
    done = result.requests["completed"]
    assert np.all((found >= 0) & (found < given_tokens))
    assert (result.summary.prefix_hit_rate or 0.0) == pytest.approx(found[done].sum() / given_tokens[done].sum())
    assert found.sum() <= result.steps["cached_tokens"].sum()
    if not result.summary.preemptions:
        assert found.sum() == result.steps["cached_tokens"].sum()


def test_conversations_find_at_most_what_was_said_before():
    """With room for all, a turn finds all full blocks of the turn before, and a first turn the system prompt."""
    result = run(scenario(prompts=SESSIONS, prefix_caching=True).with_value("workload.arrivals.rate_rps", 0.2))
    prompts, outputs = result.requests["prompt_tokens"], result.requests["output_tokens"]
    turn = result.requests["id"] % 4
    said = np.where(turn > 0, np.roll(prompts + outputs - 1, 1), 400)
    # The newest token of an answer is not computed, so it is not in the cache.
    possible = np.sum(said // 16 * 16) - 400
    assert result.steps["cached_tokens"].sum() == pytest.approx(possible, rel=0.01)


def test_host_memory_keeps_what_the_device_evicts():
    small = {"num_blocks": 140, "prefix_caching": True}
    lost = run(scenario(prompts=SESSIONS, **small))
    kept = run(scenario(prompts=SESSIONS, **small, host_kv_gib=4.0))
    assert kept.steps["moved_blocks"].sum() > 0 == lost.steps["moved_blocks"].sum()
    assert kept.summary.prefix_hit_rate > lost.summary.prefix_hit_rate


def test_swapping_saves_the_recomputation_and_costs_the_link():
    tight = {"num_blocks": 120}
    recomputed = run(scenario(**tight))
    swapped = run(scenario(**tight, preemption="swap", host_kv_gib=10.0))
    assert recomputed.summary.preemptions > 0 and swapped.summary.preemptions > 0
    assert swapped.steps["tokens"] @ swapped.steps["steps"] < recomputed.steps["tokens"] @ recomputed.steps["steps"]
    prompts = swapped.requests["prompt_tokens"].sum()
    assert swapped.steps["prefill_tokens"].sum() <= prompts, "nothing is computed twice"
    moved = swapped.steps["moved_blocks"] > 0
    assert moved.any() and swapped.steps["moved_blocks"].sum() % 2 == 0, "what goes out comes back"


def test_copies_to_the_host_take_longer_than_the_rate_of_their_link():
    """Of steps that differ in what is moved alone: the bytes over the rate that copies reach, which no link exceeds."""
    deployment, _ = deploy(scenario(num_blocks=120, preemption="swap", host_kv_gib=10.0))
    executor, link = deployment.executor(step_by_step=True), get_hardware("H100-SXM5").host
    scheduler = build_scheduler(
        deployment.scenario, deployment.model, deployment.times, deployment.memory, content_known=False
    )
    scheduler.add(Request(0, 0.0, 100, 10))
    step = scheduler.plan()
    still, moving = (executor.run(step._replace(moved_by_one=n), {}).time_s for n in (0, 64))
    at_line_rate_s = 64 * deployment.memory.block_bytes / link.bandwidth_bytes_per_s
    assert moving - still == pytest.approx(at_line_rate_s / HOST_COPY_SHARE + link.latency_s)
    assert moving - still > at_line_rate_s


def test_without_a_link_to_the_host_nothing_moves_and_one_sentence_says_so():
    hardware = get_hardware("H100-SXM5").model_copy(update={"host": None})
    with pytest.raises(MemboundError, match="gives no link to its host"):
        run(scenario(num_blocks=120, preemption="swap", host_kv_gib=10.0), hardware)


def test_more_blocks_than_fit_are_refused_and_so_is_a_prefix_cache_of_states():
    with pytest.raises(MemboundError, match="holds at most"):
        run(scenario(num_blocks=10**8))
    with pytest.raises(MemboundError, match="has recurrent states or windows"):
        run(scenario("gemma-3-12b", prefix_caching=True))


class RememberedBlocks:
    """A prefix cache that keeps every block by itself, in the order in which they go."""

    def __init__(self, host_blocks):
        self.host_blocks = host_blocks
        self.users, self.unused, self.host = {}, {}, {}
        self.lost = []

    def found(self, blocks):
        here = list(itertools.takewhile(self.users.__contains__, blocks))
        there = list(itertools.takewhile(self.host.__contains__, blocks[len(here) :]))
        return len(here), sum(block in self.unused for block in here), len(there)

    def use(self, blocks):
        for block in blocks:
            self.unused.pop(block, None)
            self.users[block] += 1

    def add(self, blocks):
        added = [block for block in blocks if block not in self.users]
        self.users |= dict.fromkeys(added, 1)
        for block in added:
            self.host.pop(block, None)
        return added

    def leave(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.unused[block] = None

    def evict(self, count):
        for _ in range(count):
            block = next(iter(self.unused))
            del self.unused[block], self.users[block]
            self.lost.append(block)
            if self.host_blocks:
                self.host[block] = None
            if len(self.host) > self.host_blocks:
                del self.host[next(iter(self.host))]


# What sequences may say, as segments: they share beginnings, and an id need not begin at the same block in all.
CONVERSATIONS = st.sampled_from([(1,), (1, 2), (1, 2, 3), (1, 4), (5, 2), (5,), (6, 3, 2)])


@settings(max_examples=300)
@given(
    moves=st.lists(
        st.tuples(CONVERSATIONS, st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(0, 3)), max_size=40
    ),
    host=st.integers(0, 6),
)
def test_a_cache_of_runs_is_one_that_keeps_every_block_by_itself(moves, host):
    cache, reference = PrefixCache(host), RememberedBlocks(host)
    evicted = []
    cache.keeper = SimpleNamespace(evicted=lambda name, to_host: evicted.append(name), forgotten=lambda name: None)
    users = []
    for ids, lengths, action in moves:
        chain = PrefixChain(ids, tuple(itertools.accumulate(lengths[: len(ids)])))
        spans = chain.spans(1)
        blocks = blocks_of(spans)
        if action <= 1:
            here, _, _ = cache.found(spans)
            held = leading(spans, here)
            cache.use(held)
            reference.use(blocks_of(held))
            added = cache.add(chain.spans(1, None, here))
            assert blocks_of(added) == reference.add(blocks[here:])
            users.append(held + added)
        elif action == 2 and users:
            left = users.pop(lengths[0] % len(users))
            cache.leave(left)
            reference.leave(blocks_of(left))
        elif action == 3 and cache.unused:
            cache.evict(count := min(cache.unused, lengths[0]))
            reference.evict(count)
        cache.check_integrity(users)
        assert (cache.found(spans), cache.unused) == (reference.found(blocks), len(reference.unused))
        assert evicted == reference.lost
        assert all(cache.has(block) == (block in reference.users) for block in blocks)
