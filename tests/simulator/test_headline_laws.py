"""The laws that articles on inference acceleration state come out of the simulator, with their limits.

Statements and their corrections: the claims ledger (`claims.csv`), ids beside each test.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from membound.roofline.results.result import RunResult
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.run import run
from membound.simulator.stacking.stacking import Stack, stack

INT4 = {"name": "weight_quantization", "format": "int4"}
NGRAM = {"name": "ngram_speculation", "gamma": 4, "alpha": 0.7, "hit_rate": 1.0}


def scenario(
    *,
    users: int | None = None,
    rate_rps: float = 1.0,
    requests: int = 100,
    prompt: Any = 64,
    output: Any = 128,
    techniques: tuple[dict[str, Any], ...] = (),
    model: str = "Llama-3.1-8B",
    hardware: str = "H100-SXM5",
    slo: dict[str, float] | None = None,
    **engine: Any,
) -> Scenario:
    def length(tokens: Any) -> Any:
        return {"kind": "fixed", "tokens": tokens} if isinstance(tokens, int) else tokens

    open_loop = {"kind": "poisson", "rate_rps": rate_rps}
    return parse_scenario(
        {
            "name": "law",
            "model": model,
            "hardware": hardware,
            "techniques": list(techniques),
            "engine": {"max_num_seqs": 256, "max_batched_tokens": 8192, "batching": "chunked_prefill"} | engine,
            "slo": slo or {},
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": users} if users else open_loop,
                "requests": requests,
                "prompts": {"kind": "synthetic", "tokens": length(prompt)},
                "output_tokens": length(output),
                "seed": 1,
            },
        }
    )


def throughput(result: RunResult) -> float:
    return result.summary.output_tokens_per_s


# -- speculation: A1-04, A1-06, A1-77, A2-33


DRAFT_MODEL = {"name": "draft_model_speculation", "draft": "Llama-3.2-1B", "gamma": 4, "alpha": 0.75}
EAGLE = {"name": "eagle", "depth": 3, "tree_size": 3}


def speculation_gain(users: int, hardware: str, technique: dict[str, Any] = NGRAM) -> float:
    plain, drafting = (
        run(scenario(users=users, requests=max(8, 2 * users), output=64, techniques=techniques, hardware=hardware))
        for techniques in ((), (technique,))
    )
    return throughput(drafting) / throughput(plain)


@pytest.mark.parametrize(("technique", "alone"), [(NGRAM, 2.0), (DRAFT_MODEL, 1.3), (EAGLE, 1.8)])
def test_speculation_that_quickens_one_user_loses_at_high_load(technique: dict[str, Any], alone: float) -> None:
    """A fixed draft length: n-grams cost nothing, so that all of their loss is verification's."""
    gains = [speculation_gain(users, "RTX-3090", technique) for users in (1, 24, 96)]
    assert all(after < before for before, after in pairwise(gains))
    assert gains[0] > alone and gains[-1] < 0.9


def test_the_load_at_which_speculation_loses_depends_on_the_device() -> None:
    """The ridge of an H100 lies four times as high as an RTX 3090's: the same load still gains there."""
    assert speculation_gain(64, "RTX-3090") < 1 < speculation_gain(64, "H100-SXM5")


# -- 4-bit weights: A1-02, A1-41, A1-42


def decode(users: int, **changes: Any) -> tuple[float, float]:
    """Seconds of a decode step that go to weights, and all its seconds."""
    steps = run(scenario(users=users, requests=2 * users, prompt=32, output=96, **changes)).steps
    decoding = steps["prefill_tokens"] == 0
    time_s, count = steps["time_s"][decoding], steps["steps"][decoding].sum()
    return float((time_s * steps["memory_weights"][decoding]).sum() / count), float(time_s.sum() / count)


@pytest.mark.parametrize(("model", "hardware"), [("Llama-2-13B", "A100-SXM4-80GB"), ("Llama-3.1-8B", "A10")])
def test_four_bit_weights_are_read_in_almost_a_quarter_of_the_time_at_batch_1(model: str, hardware: str) -> None:
    """The bytes fall by 16 / 4.125 = 3.88 (groups of 128); embeddings and the head stay in 16 bits."""
    plain, packed = (decode(1, model=model, hardware=hardware, techniques=what) for what in ((), (INT4,)))
    of_weights, of_all = plain[0] / packed[0], plain[1] / packed[1]
    assert 3 < of_weights < 3.88
    assert 2 < of_all < of_weights, "what is not weights does not shrink"


def test_four_bit_weights_give_little_where_compute_binds() -> None:
    prompts = {"users": 32, "requests": 64, "prompt": 4096, "output": 2}
    plain, packed = (run(scenario(**prompts, techniques=what)) for what in ((), (INT4,)))
    assert plain.summary.bottleneck_share["compute"] > 0.8
    assert throughput(packed) / throughput(plain) < 1.1
    gains = [
        throughput(run(scenario(users=users, requests=2 * users, hardware="A10", techniques=(INT4,))))
        / throughput(run(scenario(users=users, requests=2 * users, hardware="A10")))
        for users in (1, 16, 128)
    ]
    assert gains[0] > 2.5 and gains[-1] < 1.3 and all(after < before for before, after in pairwise(gains))


# -- prompts and outputs on engines of their own: A1-58, A1-61, A1-63

LONG = {
    "prompt": {"kind": "lognormal", "median": 3000, "sigma": 0.7, "high": 16000},
    "output": {"kind": "uniform", "low": 50, "high": 250},
}


def in_time(rate_a_gpu: float, tpot_s: float, pools: tuple[int, int] | None, budget: int = 1024) -> float:
    """The share of requests in time; engines that do both each see their share of the arrivals, again Poisson."""
    rate_rps, engine = rate_a_gpu, {}
    if pools:
        rate_rps = rate_a_gpu * sum(pools)
        engine["disaggregation"] = {"prefill_engines": pools[0], "decode_engines": pools[1]}
    slo = {"ttft_s": 3.0, "tpot_s": tpot_s}
    chosen = scenario(rate_rps=rate_rps, requests=300, slo=slo, max_batched_tokens=budget, **LONG, **engine)
    return run(chosen).summary.slo_attainment


def test_separation_keeps_a_tight_tpot_on_eight_gpus_at_a_load_that_chunks_do_not() -> None:
    apart = in_time(3.0, 0.012, (4, 4), 16384)
    assert apart > 0.95
    assert all(in_time(3.0, 0.012, None, budget) < 0.9 for budget in (512, 1024, 8192))


def test_separation_gains_nothing_where_tpot_is_loose() -> None:
    assert in_time(3.0, 0.05, None) == pytest.approx(in_time(3.0, 0.05, (4, 4), 16384), abs=0.02)


def test_a_badly_matched_ratio_of_pools_loses_what_separation_gains() -> None:
    """Six engines for prompts leave two for outputs."""
    assert in_time(4.0, 0.012, (6, 2), 16384) < in_time(4.0, 0.012, None) < in_time(4.0, 0.012, (4, 4), 16384)


@pytest.mark.parametrize("rate_a_gpu", [1.0, 2.0, 4.0])
def test_separation_of_two_gpus_delays_the_first_token_and_quickens_the_others(rate_a_gpu: float) -> None:
    """One engine has all the prompts of two."""
    together = run(scenario(rate_rps=rate_a_gpu, requests=300, **LONG)).summary
    pools = {"prefill_engines": 1, "decode_engines": 1}
    apart = run(scenario(rate_rps=2 * rate_a_gpu, requests=300, disaggregation=pools, **LONG)).summary
    assert apart.ttft_s.mean > 1.1 * together.ttft_s.mean and apart.ttft_s.p99 > together.ttft_s.p99
    assert apart.tpot_s.mean < together.tpot_s.mean


# -- stacks: A1-05, A1-07, A1-29


def stacked(techniques: list[dict[str, Any]], users: int, prompt: int) -> Stack:
    """Served by the simulator, once for each engine."""
    plain = scenario(
        users=users, requests=2 * users, prompt=prompt, output=64, hardware="RTX-3090", model="Llama-3.2-3B",
        techniques=tuple(techniques), max_num_seqs=64, batching=None,
    )  # fmt: skip
    (found,) = stack(plain, metric="tpot_s", simulate=True)
    assert found.together is not None and found.product is not None
    return found


@pytest.mark.parametrize(
    ("techniques", "users"),
    [
        ([INT4, NGRAM], 8),
        ([INT4, NGRAM], 32),
        ([INT4, {"name": "sparsity_2_4"}], 1),
        ([INT4, {"name": "kv_quantization", "format": "fp8"}, NGRAM], 32),
    ],
)
def test_the_product_of_single_gains_is_larger_than_the_real_gain_where_a_resource_is_shared(techniques, users) -> None:
    """Weights that are read in fewer steps, or in fewer bytes already, can be saved only once."""
    found = stacked(techniques, users, 256)
    assert found.product > 1.02 * found.together


def test_gains_on_different_bytes_do_more_than_multiply() -> None:
    """The limit of the law: each makes the part larger that the other one shrinks."""
    found = stacked([INT4, {"name": "kv_quantization", "format": "fp8"}], 8, 4096)
    assert found.together > found.product > 1


# -- chunks: A1-59


def test_the_budget_of_a_step_bounds_the_longest_gap_and_is_paid_with_the_first_token() -> None:
    lengths = {"prompt": {"kind": "lognormal", "median": 2000, "sigma": 1.0, "high": 16000}, "output": 100}
    gaps, first = [], []
    for budget in (256, 1024, 4096, 16384):
        result = run(scenario(rate_rps=4.0, requests=150, max_batched_tokens=budget, **lengths))
        longest = result.steps["time_s"][result.steps["steps"] == 1].max()
        gaps.append(result.itl_s.percentiles([100])[0])
        first.append(result.summary.ttft_s.mean)
        assert gaps[-1] <= longest * (1 + 1e-9) and result.steps["tokens"].max() <= budget
    assert all(before < after for before, after in pairwise(gaps)) and first[0] > first[-1]
    stalled = run(scenario(rate_rps=4.0, requests=150, batching="prefill_first", max_batched_tokens=16384, **lengths))
    assert stalled.itl_s.percentiles([100])[0] > 5 * gaps[0]


# -- paging: A1-28


def test_paging_serves_as_many_more_as_the_reserved_length_exceeds_the_used_one() -> None:
    lengths = {
        "prompt": {"kind": "uniform", "low": 50, "high": 350},
        "output": {"kind": "uniform", "low": 50, "high": 450},
    }
    busy = {"rate_rps": 1000.0, "requests": 300, "num_blocks": 1024, "max_num_seqs": 256, **lengths}
    paged, reserved = run(scenario(**busy)), run(scenario(**busy, reserved_tokens=2048))

    def together(result: RunResult) -> float:
        steps = result.steps
        return float((steps["sequences"] * steps["time_s"]).sum() / steps["time_s"].sum())

    assert reserved.steps["sequences"].max() == 1024 * 16 // 2048
    # A sequence holds 200 of its prompt and half of its 250 on average, and a block half full.
    assert together(paged) == pytest.approx(1024 * 16 / (200 + 125 + 8), rel=0.25)
    assert together(paged) > 4 * together(reserved) and throughput(paged) > 2.5 * throughput(reserved)
    assert paged.summary.kv_waste < 0.05 < 0.5 < reserved.summary.kv_waste
