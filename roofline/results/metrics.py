"""How are a run's metrics defined? As in vLLM's serving benchmark; METRICS.md beside this file has them in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from membound.roofline.results.result import BOUNDS, Column, Distribution, Summary
from membound.roofline.results.samples import Samples
from membound.roofline.scenario import Slo


def tpot_s(requests: dict[str, Column]) -> NDArray[np.float64]:
    """Time per output token after the first, one entry for each completed request of two tokens or more."""
    several = requests["completed"] & (requests["output_tokens"] > 1)
    span = requests["finished_s"][several] - requests["first_token_s"][several]
    return np.asarray(span / (requests["output_tokens"][several] - 1), dtype=np.float64)


def good_requests(requests: dict[str, Column], slo: Slo) -> int:
    """Completed requests that meet every bound that the objective gives; one token alone meets any TPOT."""
    good = requests["completed"].copy()
    ttft = requests["first_token_s"] - requests["arrival_s"]
    e2e = requests["finished_s"] - requests["arrival_s"]
    later = np.maximum(requests["output_tokens"] - 1, 1)
    tpot = (requests["finished_s"] - requests["first_token_s"]) / later
    for value, bound in ((ttft, slo.ttft_s), (tpot, slo.tpot_s), (e2e, slo.e2e_s)):
        if bound is not None:
            good &= np.nan_to_num(value, nan=np.inf) <= bound
    return int(good.sum())


def bottleneck_share(steps: dict[str, Column], idle_s: float) -> dict[str, float]:
    """The share of the run's time that each bound had; steps are split by their predicted shares. Sums to 1."""
    spent = {bound: float(np.sum(steps["time_s"] * steps[bound])) for bound in BOUNDS if bound != "idle"}
    spent["idle"] = idle_s
    total = sum(spent.values())
    return {bound: (spent[bound] / total if total > 0 else float(bound == "idle")) for bound in BOUNDS}


def _kv_waste(steps: dict[str, Column], block_size: int | None) -> float | None:
    """The share of the KV memory in use, over time, that holds no token."""
    if block_size is None or "held_tokens" not in steps:
        return None
    used = float(np.sum(steps["time_s"] * steps["blocks_used"])) * block_size
    return 1 - float(np.sum(steps["time_s"] * steps["held_tokens"])) / used if used else None


def prefix_hit_rate(requests: dict[str, Column], chosen: NDArray[np.bool_]) -> float | None:
    """Prompt tokens that the `chosen` requests found in the prefix cache when they first joined, of all.

    None where there were none, and where they are not known of each request.
    """
    if "cached_tokens" not in requests:
        return None
    prompts, found = (float(requests[name][chosen].sum()) for name in ("prompt_tokens", "cached_tokens"))
    return found / prompts if found > 0 else None


def summarize(
    requests: dict[str, Column],
    steps: dict[str, Column],
    itl_s: Samples,
    *,
    slo: Slo,
    duration_s: float,
    idle_s: float,
    num_blocks: int,
    block_size: int | None = None,
    power_w: float | None = None,
    price_usd_per_h: float | None = None,
) -> Summary:
    """The summary of a run of `duration_s` seconds whose engine waited `idle_s` of them for arrivals.

    KV waste needs the `block_size`, and the tokens held in each step.
    `power_w` is the power really drawn and `price_usd_per_h` the price of the whole deployment; None where unknown.
    """
    done = requests["completed"]
    output_tokens = float(requests["output_tokens"][done].sum())
    prompt_tokens = float(requests["prompt_tokens"][done].sum())
    count = len(done)
    completed = int(done.sum())
    failed = int(requests["failed"].sum()) if "failed" in requests else 0
    good = good_requests(requests, slo)
    busy_s = float(steps["time_s"].sum())
    drafted = float(steps["drafted"].sum())
    step_count = float(steps["steps"].sum())
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    price_per_s = None if price_usd_per_h is None else price_usd_per_h / 3600
    return Summary(
        requests=count,
        completed=completed,
        rejected=count - completed - failed,
        failed=failed,
        duration_s=duration_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) * per_s,
        requests_per_s=completed * per_s,
        ttft_s=Distribution.of((requests["first_token_s"] - requests["arrival_s"])[done]),
        tpot_s=Distribution.of(tpot_s(requests)),
        itl_s=Distribution.of_samples(itl_s),
        e2e_s=Distribution.of((requests["finished_s"] - requests["arrival_s"])[done]),
        goodput_rps=good * per_s,
        slo_attainment=good / count if count else 0.0,
        kv_utilization=float(np.sum(steps["time_s"] * steps["blocks_used"]) / (busy_s * num_blocks)) if busy_s else 0.0,
        preemptions=int(requests["preemptions"].sum()),
        kv_waste=_kv_waste(steps, block_size),
        prefix_hit_rate=prefix_hit_rate(requests, done),
        tokens_per_step=float(steps["emitted"].sum() / step_count) if step_count else 0.0,
        acceptance_rate=float(steps["accepted"].sum() / drafted) if drafted else None,
        bottleneck_share=bottleneck_share(steps, idle_s),
        energy_j_per_token=None if power_w is None or not output_tokens else power_w * duration_s / output_tokens,
        cost_usd_per_million_tokens=(
            None if price_per_s is None or not output_tokens else price_per_s * duration_s / output_tokens * 1e6
        ),
    )
