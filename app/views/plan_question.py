"""What does a person ask of Plan: which load, within which objective, on which devices, at which prices?

Every choice is in the URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from membound.app import text
from membound.app.i18n import Translate
from membound.app.views import fields
from membound.app.views.devices import known_devices
from membound.app.views.form import form
from membound.roofline import models
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


def question(t: Translate) -> dict[str, Any] | None:
    """What is asked; None while no device or no precision is chosen."""
    with form(t) as holds:
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
                told = t("plan.load_rate", rate=f"{rate:g}")
            else:
                users = int(fields.number(PAGE, "plan_users", 64, 1, 100_000, t))
                arrivals = {"kind": "closed_loop", "concurrency": users}
                told = t("plan.load_users", users=users)
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
        holds(" · ".join((t("plan.holds", model=model, load=told, prompt=prompt, output=output), *devices)))
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


def prices_paid(devices: Sequence[str], t: Translate) -> dict[str, float] | None:
    """What a device-hour costs the reader; None where all is as listed."""
    known = known_devices()
    listed = {device: known[device].price_usd_per_h or 0.0 for device in devices}
    keys = {device: f"{PRICE}{device}" for device in devices}
    paid = {}
    opened = any(key in st.query_params for key in keys.values())
    with st.container(key="form_prices"), st.expander(t("plan.prices"), expanded=opened):
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
