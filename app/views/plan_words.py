"""How is a plan said in words: what is deployed, whether it keeps the objective, and what else would?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from membound.app import deployments, text
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.views.said import said


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


def other_way(plan: Mapping[str, Any], t: Translate) -> str:
    """What the answer's device takes where prompts and outputs are served the other way, together or apart."""
    best = plan["best"]
    apart = best["deployment"]["disaggregation"] is None
    other = next((one for one in plan.get("compared", ()) if one["disaggregated"] == apart), None)
    if other is None:
        return ""
    way = "apart" if apart else "together"
    if other["best"] is None:
        return " " + t(f"plan.never_{way}", reason=text.plain(said(other["reason"], t)))
    one = other["best"]
    price = "" if one["usd_per_h"] is None else t("plan.per_hour", usd=f"{one['usd_per_h']:,.2f}")
    return " " + t(
        f"plan.would_take_{way}", gpus=one["gpus"], device=one["device"], price=price, how=how(one, t).strip()
    )


def at_the_end(plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any], objective: str, t: Translate) -> str:
    """What of all that was compared ranks first that holds where times are longest, if the answer does not."""
    end, safe = best.get("upper_end"), deployments.safest(plans, objective)
    if end is None or end["meets_slo"] or safe is None:
        return ""
    if (safe["device"], safe["gpus"]) == (end["device_that_meets_it"], end["gpus_that_meet_it"]):
        return ""  # that is said already
    price = "" if safe["usd_per_h"] is None else t("plan.per_hour", usd=f"{safe['usd_per_h']:,.2f}")
    return " " + t("plan.safest", gpus=safe["gpus"], device=safe["device"], price=price)


def prices_in_quality(plans: Sequence[Mapping[str, Any]], t: Translate) -> dict[str, list[str]]:
    """By precision what each of its techniques costs in quality; nothing of what is as published."""
    found: dict[str, list[str]] = {}
    for one in options(plans):
        of = found.setdefault(one["deployment"]["precision"], [])
        for name, note in one["deployment"]["lossy"].items():
            line = f"{technique_title(name, t)}{t('sign.colon')}{said(note, t)}"
            if line not in of:
                of.append(line)
    return {precision: lines for precision, lines in found.items() if lines}


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
