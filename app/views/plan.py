"""Page Plan: how many of which device does a load take, and what would a faster or cheaper deployment be?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from membound.app import deployments, text
from membound.app.figures import plan as figures
from membound.app.i18n import Translate
from membound.app.views import asked, fields, states
from membound.app.views.charts import chart
from membound.app.views.devices import known_devices
from membound.app.views.opening import opened, settings_of
from membound.app.views.said import said
from membound.app.views.session import translate
from membound.roofline import models
from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario, parse_scenario
from membound.simulator.planning.planner import PRECISIONS

PAGE = "plan"
MODEL = "Llama-3.1-70B"
DEVICES = ("H100-SXM5", "H200-SXM", "A100-SXM4-80GB")
LOADS, OBJECTIVES = ("open", "closed"), ("cost", "devices")
REQUESTS, SEED = 3000, 1
# The price of a device in the URL, and the highest that can be given.
PRICE, MOST_USD_PER_H = "plan_price_", 1000.0
# As engines are set up for a large device; the planner chooses what a replica holds below these.
SEATS, BUDGET = 256, 8192


def page() -> None:
    """Draw the question, and its answer as soon as somebody has asked it."""
    t = translate()
    st.title(t("plan.title"))
    st.caption(t("plan.intro"))
    try:
        spec = _question(t)
    except MemboundError as error:
        states.problem(str(error), t("plan.fix"))
        return
    if spec is None:
        return
    prices = _prices(spec["devices"], t)
    defaults = not any(name.startswith("plan_") and not name.startswith(PRICE) for name in st.query_params)
    run = asked.answer(PAGE, spec, t("plan.run"), start=defaults)
    document = None if run is None else run.comparison()
    if document is not None:
        document = document if prices is None else deployments.at_prices(document, prices)
        _answer(document, t)
        _downloads(document, t)


# --- the question ---


def _question(t: Translate) -> dict[str, Any] | None:
    with st.container(border=True):
        known = models.catalog()
        left, right = st.columns([2, 3])
        with left:
            model = fields.choice(
                PAGE,
                "plan_model",
                list(known),
                MODEL,
                t,
                lambda name: f"{name} · {text.digits(known[name].params / 1e9)} B",
            )
        with right:
            devices = fields.many(PAGE, "plan_devices", _devices(), DEVICES, t)
        load = fields.one_of(PAGE, "plan_load", LOADS, LOADS[0], t)
        cells = st.columns(5)
        with cells[0]:
            if load == "open":
                rate = fields.number(PAGE, "plan_rate", 10.0, 0.01, 100_000.0, t)
                arrivals: dict[str, Any] = {"kind": "poisson", "rate_rps": rate}
            else:
                users = int(fields.number(PAGE, "plan_users", 64, 1, 100_000, t))
                arrivals = {"kind": "closed_loop", "concurrency": users}
        with cells[1]:
            prompt = int(fields.number(PAGE, "plan_prompt", 2048, 1, 1_000_000, t, step=256))
        with cells[2]:
            output = int(fields.number(PAGE, "plan_output", 256, 2, 100_000, t, step=64))
        with cells[3]:
            ttft_ms = fields.number(PAGE, "plan_ttft", 1000.0, 1.0, 1e6, t, step=100)
        with cells[4]:
            tpot_ms = fields.number(PAGE, "plan_tpot", 50.0, 0.1, 1e5, t, step=5)
        with st.container(horizontal=True, gap="large"):
            precisions = fields.several(
                PAGE, "plan_precisions", PRECISIONS, PRECISIONS[:2], t, lambda name: t(f"plan.precision_{name}")
            )
            objective = fields.one_of(PAGE, "plan_objective", OBJECTIVES, OBJECTIVES[0], t)
            split = not fields.switch(PAGE, "plan_together", t)
    if not devices or not precisions:
        st.info(t("plan.choose_some"), icon=":material/dns:")
        return None
    scenario = _scenario(
        model, devices[0], arrivals, (prompt, output), {"ttft_s": ttft_ms / 1e3, "tpot_s": tpot_ms / 1e3}
    )
    return {
        "scenario": scenario.to_yaml(),
        "devices": devices,
        "precisions": precisions,
        "objective": objective,
        "disaggregate": split,
    }


def _prices(devices: Sequence[str], t: Translate) -> dict[str, float] | None:
    """What a device-hour costs the reader; None where all is as listed."""
    known = known_devices()
    listed = {device: known[device].price_usd_per_h or 0.0 for device in devices}
    keys = {device: f"{PRICE}{device}" for device in devices}
    paid = {}
    with st.expander(t("plan.prices"), expanded=any(key in st.query_params for key in keys.values())):
        st.caption(t("plan.prices_help"))
        for cell, (device, key) in zip(st.columns(max(4, len(devices))), keys.items(), strict=False):
            with cell:
                paid[device] = fields.amount(key, device, listed[device], MOST_USD_PER_H)
    return None if paid == listed else paid


def _devices() -> list[str]:
    return [name for name, device in known_devices().items() if device.kind != "cpu"]


def _scenario(
    model: str, device: str, arrivals: dict[str, Any], tokens: tuple[int, int], slo: dict[str, float]
) -> Scenario:
    prompt, output = tokens
    return parse_scenario(
        {
            "name": "plan",
            "model": model,
            "hardware": device,
            "engine": {"max_num_seqs": SEATS, "max_batched_tokens": BUDGET},
            "techniques": ["continuous_batching"],
            "workload": {
                "arrivals": arrivals,
                "requests": REQUESTS,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": prompt}},
                "output_tokens": {"kind": "fixed", "tokens": output},
                "seed": SEED,
            },
            "slo": slo,
        }
    )


# --- the answer ---


def _answer(document: Mapping[str, Any], t: Translate) -> None:
    plans: Sequence[Mapping[str, Any]] = document["devices"]
    best = next((plan for plan in plans if plan["device"] == document["best"]), None)
    if best is None:
        st.header(t("plan.nothing"))
    else:
        st.header(_headline(best, document["objective"], t))
        st.write(_conditions(best, t) + _with_loss(plans, best["best"], document["objective"], t))
    _cards(plans, t)
    for plan in plans:
        if plan["best"] is None:
            st.warning(
                text.plain(f"{plan['device']}{t('sign.colon')}{said(plan['reason'], t)}"), icon=":material/block:"
            )
    demand = next((plan["demand"] for plan in plans if "demand" in plan), None)
    if demand is None:
        return
    _table(plans, demand, t)
    _runners_up(plans, t)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.header(t("plan.front"))
        picked = chart(
            figures.front_figure(plans, demand["slo"], t),
            key="front",
            alt=figures.front_alt(plans, t),
            caption=t(
                "plan.front_caption",
                model=demand["model"],
                prompt=f"{demand['prompt_tokens']:,.0f}",
                output=f"{demand['output_tokens']:,.0f}",
            ),
            table=_front_table(plans, t),
            select=True,
        )
        _point(figures.front_points(plans), picked, demand, t)
    with right:
        if best is not None and best["sensitivity"]:
            _sensitivity(best, t)
    notes = dict.fromkeys(note for plan in plans for note in plan.get("notes", ()))
    if notes:
        st.caption(text.plain(" · ".join(notes)))


def _cards(plans: Sequence[Mapping[str, Any]], t: Translate) -> None:
    """How many of each device, at a glance."""
    with st.container(horizontal=True, gap="large"):
        for plan in plans:
            best = plan["best"]
            gpus = "–" if best is None else t("plan.gpus", gpus=best["gpus"])
            price = None
            if best is not None and best["usd_per_h"] is not None:
                price = t("plan.per_hour_short", usd=f"{best['usd_per_h']:,.2f}")
            st.metric(plan["device"], gpus, price, delta_color="off", delta_arrow="off", width="content")


def _headline(plan: Mapping[str, Any], objective: str, t: Translate) -> str:
    best = plan["best"]
    price = "" if best["usd_per_h"] is None else t("plan.per_hour", usd=f"{best['usd_per_h']:,.2f}")
    return t(f"plan.answer_{objective}", gpus=best["gpus"], device=best["device"], price=price)


def _conditions(plan: Mapping[str, Any], t: Translate) -> str:
    best, demand = plan["best"], plan["demand"]
    load = (
        t("plan.load_rate", rate=text.digits(demand["rate_rps"]))
        if demand["rate_rps"]
        else t("plan.load_users", users=f"{demand['concurrency']:,.0f}")
    )
    told = t("plan.deployed", how=_how(best, t), model=demand["model"], load=load)
    if best["summary"]:
        slo = demand["slo"]
        told += " " + t(
            "plan.latencies",
            ttft=text.seconds(best["summary"]["ttft_s"]["p99"]),
            ttft_slo=text.seconds(slo["ttft_s"]),
            tpot=text.seconds(best["summary"]["tpot_s"]["p99"]),
            tpot_slo=text.seconds(slo["tpot_s"]),
        )
    origin = best["origin"]
    told += " " + t(
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


def _with_loss(plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any], objective: str, t: Translate) -> str:
    """What ranks before the answer at a price in quality, which the planner does not pay unasked."""
    lossy = [one for one in _rows(plans) if not one["deployment"]["lossless"]]
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


def _how(deployed: Mapping[str, Any], t: Translate) -> str:
    """`3 engines for prompts and 1 for outputs, each TP 2`."""
    parts = deployed["deployment"]
    degrees = ", ".join(f"{name.upper()} {value}" for name, value in parts["parallel"].items() if value > 1) or "TP 1"
    pools = parts["disaggregation"]
    if pools:
        return t("plan.pools", prefill=pools["prefill_engines"], decode=pools["decode_engines"], degrees=degrees)
    return t("plan.replicas", replicas=parts["replicas"], degrees=degrees)


def _runners_up(plans: Sequence[Mapping[str, Any]], t: Translate) -> None:
    """What the simulator also saw keep the objective, at a higher price or with more devices."""
    rows = [one for plan in plans for one in plan.get("confirmed", ())[1:]]
    if rows:
        with st.expander(t("plan.runners_up", count=len(rows))):
            st.dataframe(_deployments(rows, t), hide_index=True, key="runners_up")


def _rows(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best of each device and precision."""
    return [one for plan in plans for one in plan["options"].values() if one is not None]


def _table(plans: Sequence[Mapping[str, Any]], demand: Mapping[str, Any], t: Translate) -> None:
    rows = _rows(plans)
    if not rows:
        return
    st.dataframe(_deployments(rows, t), hide_index=True, key="plan_table")
    prices = {one["device"]: one["price"] for one in rows if one["price"]}
    priced = "; ".join(f"{device}: {price['source']}, {price['date']}" for device, price in prices.items())
    st.caption(text.plain(t("plan.table_caption", prices=priced or t("plan.own_prices"))))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(t("plan.open"))
        for index, one in enumerate(rows):
            precision = t(f"plan.precision_{one['deployment']['precision']}")
            opened(
                f"{one['gpus']} × {one['device']}{t('sign.comma')}{precision}",
                settings_of(one, demand),
                key=f"open_{index}",
            )


def _deployments(rows: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("plan.c_device"): one["device"],
            t("plan.c_precision"): t(f"plan.precision_{one['deployment']['precision']}"),
            t("plan.c_gpus"): one["gpus"],
            t("plan.c_how"): _how(one, t),
            t("plan.c_usd_h"): _money(one["usd_per_h"]),
            t("plan.c_usd_mtok"): _money(one["cost_usd_per_million_tokens"]),
            t("plan.c_energy"): _number(one["energy_j_per_token_at_board_power"], "J"),
            t("plan.c_ttft"): _p99(one, "ttft_s"),
            t("plan.c_tpot"): _p99(one, "tpot_s"),
            t("plan.c_upper_end"): _holds(one, t),
            t("plan.c_quality"): t("plan.as_published" if one["deployment"]["lossless"] else "plan.lossy"),
        }
        for one in rows
    )


def _holds(one: Mapping[str, Any], t: Translate) -> str:
    """`✓`, or how many devices keep the objective at the upper end of the times."""
    end = one.get("upper_end")
    if end is None:
        return "–"
    if end["meets_slo"]:
        return "✓"
    enough = end["gpus_that_meet_it"]
    return f"✕ {t('plan.gpus', gpus=enough)}" if enough else "✕"


def _money(usd: float | None) -> str:
    return "–" if usd is None else f"${usd:,.2f}"


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{text.digits(value)} {unit}"


def _p99(one: Mapping[str, Any], name: str) -> str:
    return text.milliseconds(one["summary"][name]["p99"]) if one["summary"] else "–"


def _front_table(plans: Sequence[Mapping[str, Any]], t: Translate) -> pd.DataFrame:
    return pd.DataFrame(
        {
            t("plan.c_device"): point["device"],
            t("plan.c_precision"): t(f"plan.precision_{point['deployment']['precision']}"),
            t("plan.c_gpus"): point["gpus"],
            t("plan.c_batch"): round(point["batch"]),
            t("plan.x"): round(point["tokens_per_s_per_user"], 2),
            t("plan.y"): round(point["tokens_per_s_per_gpu"], 1),
            t("plan.c_ttft_mean"): text.seconds(point["ttft_s"]),
            t("plan.c_usd_mtok"): _money(point["cost_usd_per_million_tokens"]),
            t("plan.c_meets"): "✓" if point["meets_slo"] else "–",
        }
        for point in figures.front_points(plans)
    )


def _point(points: Sequence[Mapping[str, Any]], picked: Sequence[Any], demand: Mapping[str, Any], t: Translate) -> None:
    """What a click on the front chose, with a way into Simulate."""
    number = next((one for one in picked if isinstance(one, int) and 0 <= one < len(points)), None)
    if number is None:
        st.caption(t("plan.click"))
        return
    point = points[number]
    name = f"{point['gpus']} × {point['device']}, " + t("plan.batch", batch=round(point["batch"]))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(t("plan.open"))
        opened(name, settings_of(point, demand), key="open_point")


def _downloads(document: Mapping[str, Any], t: Translate) -> None:
    """All answers as JSON, and the best deployment as a scenario that `membound simulate` takes."""
    best = next((plan["best"] for plan in document["devices"] if plan["device"] == document["best"]), None)
    with st.container(horizontal=True):
        content = json.dumps(document, ensure_ascii=False, indent=1)
        st.download_button(t("download.json"), content, "membound-plan.json", "application/json", on_click="ignore")
        if best is not None:
            scenario = parse_scenario(best["scenario"]).to_yaml()
            st.download_button(
                t("download.yaml"), scenario, "membound-plan.yaml", "application/yaml", on_click="ignore"
            )


def _sensitivity(plan: Mapping[str, Any], t: Translate) -> None:
    found = plan["sensitivity"]
    st.header(t("plan.sensitivity"))
    binds = t(f"plan.resource_{found['binds']}") if found["binds"] else "–"
    chart(
        figures.sensitivity_figure(found["elasticity"], t),
        key="sensitivity",
        alt=t("plan.sensitivity_alt", binds=binds),
        caption=t("plan.sensitivity_caption", device=plan["device"]),
        table=pd.DataFrame(
            {t("plan.c_resource"): t(f"plan.resource_{name}"), t("plan.elasticity"): round(value, 3)}
            for name, value in found["elasticity"].items()
        ),
    )
    changes = found["answer_changes"]
    if changes:
        listed = "; ".join(f"{said(change, t)} → {said(answer, t)}" for change, answer in changes.items())
        st.write(text.plain(t("plan.changes", answer=said(found["screened_answer"], t), changes=listed)))
    else:
        st.write(text.plain(t("plan.no_changes", answer=said(found["screened_answer"], t))))
