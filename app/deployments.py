"""How many of each device does a load take, and which is the cheapest? One plan for each device, in one document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from membound.roofline.errors import MemboundError
from membound.roofline.progress import Progress
from membound.roofline.scenario import Scenario
from membound.simulator.planning.demand import Objective
from membound.simulator.planning.document import to_json
from membound.simulator.planning.planner import plan

CONFIRMED = 3


def plan_each(
    scenario: Scenario,
    devices: Sequence[str],
    precisions: Sequence[str],
    objective: Objective,
    disaggregate: bool,
    progress: Progress,
) -> dict[str, Any]:
    """The plan on each device alone, with prompts and outputs together and apart, and which of them ranks first.

    A device that cannot hold the model has its reason. Raises MemboundError where none can be planned for.
    """
    plans: list[dict[str, Any]] = []
    for index, device in enumerate(devices):

        def part(fraction: float, message: str, index: int = index, device: str = device) -> None:
            progress((index + fraction) / len(devices), f"{device} ({index + 1}/{len(devices)})")

        try:
            found = plan(
                scenario,
                devices=[device],
                precisions=precisions,
                objective=objective,
                confirm=CONFIRMED,
                disaggregate=disaggregate,
                compares=True,
                progress=part,
            )
        except MemboundError as error:
            if not _is_about(error):
                raise
            plans.append({"device": device, "best": None, "reason": str(error), "front": [], "options": {}})
        else:
            plans.append({"device": device, **to_json(found)})
    best = min((plan["best"] for plan in plans if plan["best"]), key=lambda one: rank(one, objective), default=None)
    return {
        "objective": objective,
        "devices": plans,
        "best": None if best is None else best["device"],
        "precisions": list(precisions),
    }


def at_prices(document: dict[str, Any], prices: dict[str, float]) -> dict[str, Any]:
    """The same answers where a device-hour costs something else; 0 stands for a price that nobody knows.

    A price is the same for all deployments of a device, so that it changes which device is best, and no deployment.
    """
    objective = document["objective"]
    plans = [_priced(plan, prices.get(plan["device"], 0.0)) for plan in document["devices"]]
    best = min((plan["best"] for plan in plans if plan["best"]), key=lambda one: rank(one, objective), default=None)
    return document | {"devices": plans, "best": None if best is None else best["device"]}


def _priced(plan: dict[str, Any], usd_per_h: float) -> dict[str, Any]:
    def deployed(one: dict[str, Any] | None) -> dict[str, Any] | None:
        if one is None:
            return None
        usd = usd_per_h * one["gpus"] if usd_per_h else None
        return one | {
            "usd_per_h": usd,
            "cost_usd_per_million_tokens": None if usd is None else usd / 3600.0 / one["output_tokens_per_s"] * 1e6,
            "price": None,
        }

    def at_batch(point: dict[str, Any]) -> dict[str, Any]:
        usd = usd_per_h / 3600.0 / point["tokens_per_s_per_gpu"] * 1e6 if usd_per_h else None
        return point | {"cost_usd_per_million_tokens": usd}

    def compared(one: dict[str, Any]) -> dict[str, Any]:
        end = one["at_upper_end"]
        priced = end and end | {"usd_per_h": usd_per_h * end["gpus"] if usd_per_h else None}
        return one | {"best": deployed(one["best"]), "at_upper_end": priced}

    return plan | {
        "best": deployed(plan["best"]),
        "options": {name: deployed(one) for name, one in plan["options"].items()},
        "confirmed": [deployed(one) for one in plan.get("confirmed", ())],
        "compared": [compared(one) for one in plan.get("compared", ())],
        "front": [at_batch(point) for point in plan["front"]],
    }


def both_ways(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best of each device with prompts and outputs on the same engines, and with each on engines of their own."""
    return [one for plan in plans for one in plan.get("compared", ()) if one["best"] is not None]


def safest(plans: Sequence[Mapping[str, Any]], objective: str) -> Mapping[str, Any] | None:
    """Of all devices and ways to serve what ranks first that was seen to hold at the upper end of its times."""
    held = [one["at_upper_end"] for one in both_ways(plans) if one["at_upper_end"] is not None]
    return min(held, key=lambda place: rank(place, objective), default=None)


def rank(deployed: Mapping[str, Any], objective: str) -> tuple[float, ...]:
    """Smaller is better, as the planner ranks: a device without a price comes after all that have one."""
    usd = math.inf if deployed["usd_per_h"] is None else float(deployed["usd_per_h"])
    return (usd, deployed["gpus"]) if objective == "cost" else (deployed["gpus"], usd)


def _is_about(error: MemboundError) -> bool:
    """Whether the refusal is of one device, not of the question."""
    return str(error).startswith("no device can hold the model")
