"""How is a plan said in words: what is deployed, whether it keeps the objective, and what else would?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from membound.app import deployments, text
from membound.app.i18n import Translate


def headline(plan: Mapping[str, Any], objective: str, t: Translate) -> str:
    """How many of which device, at which price."""
    best = plan["best"]
    price = "" if best["usd_per_h"] is None else t("plan.per_hour", usd=f"{best['usd_per_h']:,.2f}")
    return t(f"plan.answer_{objective}", gpus=best["gpus"], device=best["device"], price=price)


def served(plan: Mapping[str, Any], t: Translate) -> str:
    """How it is deployed, and what its users get."""
    best, demand = plan["best"], plan["demand"]
    load = (
        t("plan.load_rate", rate=text.digits(demand["rate_rps"]))
        if demand["rate_rps"]
        else t("plan.load_users", users=f"{demand['concurrency']:,.0f}")
    )
    told = t("plan.deployed", how=how(best, t), model=demand["model"], load=load)
    if best["summary"]:
        slo = demand["slo"]
        told += " " + t(
            "plan.latencies",
            ttft=text.seconds(best["summary"]["ttft_s"]["p99"]),
            ttft_slo=text.seconds(slo["ttft_s"]),
            tpot=text.seconds(best["summary"]["tpot_s"]["p99"]),
            tpot_slo=text.seconds(slo["tpot_s"]),
        )
    return told


def trust(plan: Mapping[str, Any], t: Translate) -> str:
    """How far its times can be trusted, and whether the answer holds at the upper end of their interval."""
    best = plan["best"]
    origin = best["origin"]
    told = t(
        f"plan.origin_{origin['kind']}",
        device=best["device"],
        error=text.percent(origin["relative_error"]),
        scopes=t("sign.list").join(origin["inherited_from"]),
    )
    return told + _at_upper_end(best, t)


def _at_upper_end(best: Mapping[str, Any], t: Translate) -> str:
    """Whether the answer holds where its times are as long as their interval allows, and else what would."""
    end = best.get("upper_end")
    if end is None:
        return ""
    holds = "holds" if end["meets_slo"] else "more" if end["gpus_that_meet_it"] else "never"
    words = {"error": text.percent(end["relative_error"]), "gpus": end["gpus_that_meet_it"], "device": best["device"]}
    return " " + t(f"plan.upper_end_{holds}", **words)


def with_loss(plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any], objective: str, t: Translate) -> str:
    """What ranks before the answer at a price in quality, which the planner does not pay unasked."""
    lossy = [one for one in options(plans) if not one["deployment"]["lossless"]]
    first = min(lossy, key=lambda one: deployments.rank(one, objective), default=None)
    if (
        first is None
        or not best["deployment"]["lossless"]
        or deployments.rank(first, objective) >= deployments.rank(best, objective)
    ):
        return ""
    price = "" if first["usd_per_h"] is None else t("plan.per_hour", usd=f"{first['usd_per_h']:,.2f}")
    precision = t(f"plan.precision_{first['deployment']['precision']}")
    return " " + t("plan.with_loss", gpus=first["gpus"], device=first["device"], precision=precision, price=price)


def how(deployed: Mapping[str, Any], t: Translate) -> str:
    """`3 engines for prompts and 1 for outputs, each TP 2`."""
    parts = deployed["deployment"]
    degrees = ", ".join(f"{name.upper()} {value}" for name, value in parts["parallel"].items() if value > 1) or "TP 1"
    pools = parts["disaggregation"]
    if pools:
        return t("plan.pools", prefill=pools["prefill_engines"], decode=pools["decode_engines"], degrees=degrees)
    return t("plan.replicas", replicas=parts["replicas"], degrees=degrees)


def options(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best of each device and precision."""
    return [one for plan in plans for one in plan["options"].values() if one is not None]
