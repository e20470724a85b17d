"""What does `membound plan --json` print?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from membound.simulator.planning.candidates import ReplicaCurves
from membound.simulator.planning.compared import Compared, safest
from membound.simulator.planning.deployed import Deployed
from membound.simulator.planning.front import FrontPoint
from membound.simulator.planning.planner import Plan, certainty_of
from membound.simulator.planning.sensitivity import Changed, UpperEnd


def to_json(found: Plan) -> dict[str, Any]:
    demand = found.demand
    return {
        "best": _deployed_json(found, found.best),
        "reason": found.reason,
        "front": [_front_json(point) for point in found.front],
        "confirmed": [_deployed_json(found, one) for one in found.confirmed],
        "options": {name: _deployed_json(found, one) for name, one in found.options.items()},
        "compared": [_compared_json(found, one) for one in found.compared],
        "safest": _place_json(safest(found.compared, found.objective)),
        "sensitivity": None
        if found.sensitivity is None
        else {
            "binds": found.sensitivity.binds,
            "elasticity": found.sensitivity.elasticity,
            "screened_answer": found.sensitivity.screened_answer,
            "answer_changes": found.sensitivity.answer_changes,
            "changed": [_changed_json(one) for one in found.sensitivity.changed],
        },
        "demand": {
            "model": found.scenario.model,
            "rate_rps": demand.rate_rps,
            "mean_rps": demand.mean_rps or demand.rate_rps,
            "busiest": demand.busiest,
            "concurrency": demand.concurrency,
            "think_s": demand.think_s,
            "prompt_tokens": demand.lengths.prompt_tokens,
            "output_tokens": demand.lengths.output_tokens,
            "slo": demand.slo.model_dump(),
            "profile": found.scenario.engine.profile,
        },
        "objective": found.objective,
        "screened": found.screened,
        "simulated": found.simulated,
        "unpriced": list(found.unpriced),
        "notes": list(found.notes),
        "missing": found.missing,
    }


def _upper_end_json(end: UpperEnd | None) -> dict[str, Any] | None:
    if end is None:
        return None
    enough = end.enough
    return {
        "relative_error": end.error,
        "meets_slo": end.holds,
        "gpus_that_meet_it": None if enough is None else enough.gpus,
        "device_that_meets_it": None if enough is None else enough.replica.hardware.name,
        "usd_per_h_that_meets_it": None if enough is None else enough.usd_per_h,
    }


def _compared_json(found: Plan, one: Compared) -> dict[str, Any]:
    """The best of a device and a way to serve, `at_upper_end` the least that was seen to hold there."""
    return {
        "device": one.device,
        "disaggregated": one.apart,
        "best": _deployed_json(found, one.best, one.end),
        "reason": one.reason,
        "at_upper_end": _place_json(one.safe),
    }


def _place_json(deployed: Deployed | None) -> dict[str, Any] | None:
    if deployed is None:
        return None
    return {"device": deployed.replica.hardware.name, "gpus": deployed.gpus, "usd_per_h": deployed.usd_per_h}


def _changed_json(one: Changed) -> dict[str, Any]:
    answer = one.answer
    return {
        "input": one.name,
        "easier": one.easier,
        "changes": one.changes,
        "device": None if answer is None else answer.replica.hardware.name,
        "gpus": None if answer is None else answer.gpus,
        "usd_per_h": None if answer is None else answer.usd_per_h,
    }


def _parts(replica: ReplicaCurves, engines: int = 1) -> dict[str, Any]:
    scenario = replica.scenario
    return {
        "precision": replica.precision.name,
        "lossless": replica.precision.lossless,
        "lossy": {one.name: one.quality.note for one in replica.precision.lossy},
        "techniques": [technique.model_dump(mode="json") for technique in scenario.techniques],
        "parallel": replica.parallel.degrees(),
        "gpus_per_replica": replica.devices * engines,
        "max_num_seqs": scenario.seats,
        "max_batched_tokens": scenario.step_tokens,
        "batching": scenario.engine.batching,
    }


def _deployed_json(found: Plan, deployed: Deployed | None, end: UpperEnd | None = None) -> dict[str, Any] | None:
    if deployed is None:
        return None
    replica, demand = deployed.replica, deployed.demand
    pools = deployed.prompt_engines
    estimate = None if pools else replica.at(demand, np.array([demand.amount / deployed.replicas]))._asdict()
    price = replica.hardware.price
    parts = _parts(replica, pools + deployed.replicas if pools else 1)
    ratio = {"prefill_engines": pools, "decode_engines": deployed.replicas} if pools else None
    return {
        "device": replica.hardware.name,
        "gpus": deployed.gpus,
        "deployment": {"replicas": 1 if pools else deployed.replicas, **parts, "disaggregation": ratio},
        "summary": None if deployed.summary is None else deployed.summary.model_dump(mode="json"),
        "estimate": estimate and {name: _finite(float(value[0])) for name, value in estimate.items()},
        "requests_per_s": deployed.requests_per_s,
        "output_tokens_per_s": deployed.output_tokens_per_s,
        "usd_per_h": deployed.usd_per_h,
        "cost_usd_per_million_tokens": deployed.usd_per_million_tokens,
        "price": None if price is None else price.model_dump(mode="json"),
        "origin": certainty_of(replica).to_json(),
        "upper_end": _upper_end_json(end or found.upper_end(deployed)),
        "energy_j_per_token_at_board_power": deployed.energy_j_per_token,
        "scenario": deployed.scenario.model_dump(mode="json"),
    }


def _front_json(point: FrontPoint) -> dict[str, Any]:
    return {
        "device": point.replica.hardware.name,
        "gpus": point.replica.devices,
        "deployment": _parts(point.replica),
        "origin": certainty_of(point.replica).to_json(),
        "batch": point.batch,
        "tokens_per_s_per_user": point.user_tokens_per_s,
        "tokens_per_s_per_gpu": point.gpu_tokens_per_s,
        "ttft_s": point.ttft_s,
        "meets_slo": point.meets_slo,
        "cost_usd_per_million_tokens": point.usd_per_million_tokens,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
