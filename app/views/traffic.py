"""Which traffic, engine and cluster does a person choose on Simulate? Every choice is in the URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import streamlit as st

from membound.app import text, uploads
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.serving import POLICIES, value_of
from membound.app.views import choices, fields, linked, scenario_choice
from membound.app.views.form import form
from membound.app.views.session import store
from membound.roofline import hardware, models
from membound.roofline.errors import MemboundError
from membound.roofline.models.files import resolve_model
from membound.roofline.scenario import Scenario, parse_scenario, shipped_scenarios
from membound.roofline.scenario.cluster import RouterName
from membound.roofline.scenario.engine import BatchingName, OrderName
from membound.roofline.scenario.workload import TraceArrivals
from membound.roofline.techniques import engine_setup
from membound.roofline.times.engines import profiles
from membound.simulator.planning.choices import precisions
from membound.simulator.planning.planner import PRECISIONS
from membound.simulator.scheduling.workload.traces import read_trace

PAGE = "simulate"
FORM = "form"
# What a scenario may come from: the form, one that ships, or the reader's own text.
SOURCES = (FORM, *shipped_scenarios(), scenario_choice.OWN)
TRAFFICS = ("poisson", "closed_loop", "gamma", "sessions", "trace")
SPREADS = ("fixed", "varied")
# exp(N(ln median, sigma)): lengths of chats spread about so; see data/tasks/chat.yaml
SIGMA = 0.7
BATCHINGS: tuple[BatchingName, ...] = get_args(BatchingName)
ORDERS: tuple[OrderName, ...] = ("fcfs", "deadline", "slack")
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)
DRAFTS = ("none", "ngram_speculation", "eagle", "medusa", "mtp")
TRACE_TYPES = ("csv", "jsonl", "json", "txt")
GOOD = "✓"
# What stands behind a button, in its order there.
MORE = (
    *("formats", "draft", "policy", "order", "seats", "budget", "prefix", "replicas", "most", "queue", "router"),
    *("fail_at", "fail_for", "pre", "dec", "pp", "dp", "ep", "profile"),
)
# Tokens at which a conversation ends, where the model does not end it before.
MOST_CONTEXT = 32_768
# Rows of an upload that the page itself looks at; the worker reads all.
LOOKED_AT = 200
DEFAULTS: dict[str, Any] = {
    "from": FORM,
    "model": choices.MODEL,
    "hw": choices.DEVICE,
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "ep": 1,
    "formats": PRECISIONS[0],
    "draft": DRAFTS[0],
    "profile": "graphs",
    "traffic": TRAFFICS[0],
    "rate": 12.0,
    "users": 32,
    "cv": 3.0,
    "requests": 1000,
    "prompt": 1024,
    "output": 256,
    "spread": "varied",
    "turns": 4.0,
    "think": 10.0,
    "system": 500,
    "trace": "",
    "speed": 1.0,
    "policy": "chunked_prefill",
    "order": "fcfs",
    "seats": 128,
    "budget": 8192,
    "prefix": False,
    "versus": ["prefill_first"],
    "replicas": 1,
    "router": "least_loaded",
    "most": 0,
    "queue": 32,
    "fail_at": 0.0,
    "fail_for": 60.0,
    "pre": 0,
    "dec": 0,
    "ttft": 1000.0,
    "tpot": 50.0,
}


def question(t: Translate) -> tuple[Scenario, list[str]] | None:
    """The scenario of the form and the policies to compare it with; None while a trace is missing.

    Raises MemboundError where the choices contradict each other.
    """
    chosen: dict[str, Any] = {}
    with form(t) as holds:
        first, *others = st.columns(4)
        with first:
            source = fields.choice(PAGE, "from", SOURCES, FORM, t, lambda name: _source(name, t))
        if source != FORM:
            scenario = scenario_choice.chosen(source, t)
            listed = [name for name, field in POLICIES.items() if scenario and _applies(scenario, name, field)]
            versus = fields.several(PAGE, "versus", listed, (), t, lambda name: t(f"simulate.case_{name}"))
            holds(_source(source, t))
            return None if scenario is None else (scenario, versus)
        _engine(chosen, others, t)
        _traffic(chosen, t)
        ttft, tpot, against, more = st.columns([1, 1, 2.6, 1.1], vertical_alignment="bottom")
        with more.popover(t("simulate.more"), icon=":material/tune:", width="stretch"):
            _more(chosen, t)
        with ttft:
            _number(chosen, "ttft", 1.0, 1e6, t, 100)
        with tpot:
            _number(chosen, "tpot", 0.1, 1e5, t, 5)
        with against:
            chosen["versus"] = fields.several(
                PAGE, "versus", _others(chosen), DEFAULTS["versus"], t, lambda name: t(f"simulate.case_{name}")
            )
        if changed := _changed(chosen, t):
            st.caption(text.plain(changed))
        of = t("engine.of", model=chosen["model"], device=choices.device_title(chosen["hw"], t))
        holds(" · ".join(filter(None, (of, t(f"{PAGE}.traffic_{chosen['traffic']}"), _load(chosen, t), changed))))
    if chosen["traffic"] == "trace" and not chosen["trace"]:
        st.info(t("simulate.need_trace"), icon=":material/upload_file:")
        return None
    return scenario_of(chosen), chosen["versus"]


def _source(name: str, t: Translate) -> str:
    return t(f"simulate.from_{name}") if name in (FORM, scenario_choice.OWN) else name


def _applies(scenario: Scenario, policy: str, field: str) -> bool:
    """Whether a policy is another one than the scenario's own, and has something to decide."""
    own = value_of(scenario, policy)
    return own != policy and (field != "cluster.router" or scenario.cluster is not None)


def _number(chosen: dict[str, Any], key: str, low: float, high: float, t: Translate, step: float | None = None) -> None:
    chosen[key] = fields.number(PAGE, key, DEFAULTS[key], low, high, t, step=step)


def _engine(chosen: dict[str, Any], columns: Sequence[Any], t: Translate) -> None:
    left, middle, right = columns
    with left:
        model = choices.choose_model(t)
    with middle:
        chosen["hw"] = choices.choose_device(t)
    with right:
        degrees = choices.divisors(model, engine_setup((), published=model.published))
        chosen["tp"] = fields.one_of("choice", "tp", degrees, 1, t, str)
    chosen["model"] = model.name


def _traffic(chosen: dict[str, Any], t: Translate) -> None:
    kind = chosen["traffic"] = fields.one_of(PAGE, "traffic", TRAFFICS, DEFAULTS["traffic"], t)
    if kind == "trace":
        _trace(chosen, t)
        return
    cells = iter(st.columns(5))
    with next(cells):
        if kind == "closed_loop":
            _number(chosen, "users", 1, 100_000, t)
        else:
            _number(chosen, "rate", 0.01, 100_000.0, t)
    with next(cells):
        _number(chosen, "requests", 1, 100_000, t, 100)
    with next(cells):
        _number(chosen, "prompt", 1, 1_000_000, t, 256)
    with next(cells):
        _number(chosen, "output", 1, 100_000, t, 64)
    with next(cells):
        chosen["spread"] = fields.one_of(PAGE, "spread", SPREADS, DEFAULTS["spread"], t)
    if kind == "gamma":
        _numbers(chosen, 5, (("cv", 0.1, 20.0, 0.5),), t)
    if kind == "sessions":
        of_talks = (("turns", 1.0, 1000.0, 1), ("think", 0.0, 1e5, 1), ("system", 0, 100_000, 100))
        _numbers(chosen, 5, of_talks, t)


def _load(chosen: Mapping[str, Any], t: Translate) -> str:
    """How much comes: a rate or a number of users; nothing of a trace, which says it itself."""
    if "rate" in chosen:
        return t("plan.load_rate", rate=f"{chosen['rate']:g}")
    return t("plan.load_users", users=chosen["users"]) if "users" in chosen else ""


def _trace(chosen: dict[str, Any], t: Translate) -> None:
    """An upload goes to the store, and its digest into the URL."""
    left, middle, right = st.columns([3, 1, 1])
    with left:
        uploaded = st.file_uploader(
            t("simulate.upload"), type=TRACE_TYPES, max_upload_size=uploads.MOST_MB, help=t("simulate.upload_help")
        )
    chosen["trace"] = linked.seed("trace", str, "")
    if uploaded is not None:
        chosen["trace"] = st.session_state["trace"] = uploads.keep(store(), uploaded.getvalue())
    linked.keep("trace", "")
    with middle:
        _number(chosen, "speed", 0.01, 1000.0, t, 0.5)
    with right:
        _number(chosen, "requests", 1, 100_000, t, 100)
    if chosen["trace"]:
        try:
            rows = list(islice(read_trace(_trace_arrivals(chosen)), LOOKED_AT))
        except MemboundError as error:
            raise uploads.renamed(error) from None
        prompt = sum(row.prompt_tokens for row in rows) / len(rows)
        output = sum(row.output_tokens for row in rows) / len(rows)
        st.caption(
            t(
                "simulate.trace_seen",
                rows=len(rows),
                seconds=f"{rows[-1].time_s:,.1f}",
                prompt=f"{prompt:,.0f}",
                output=f"{output:,.0f}",
            )
        )


def _trace_arrivals(chosen: Mapping[str, Any]) -> TraceArrivals:
    path = uploads.find(store(), chosen["trace"])
    return TraceArrivals(file=str(path), speed=chosen["speed"], zero_tokens="drop")


def _more(chosen: dict[str, Any], t: Translate) -> None:
    """What most people leave as it is: formats, drafts, the scheduler, replicas and failures, the engine's profile."""
    chosen["formats"] = fields.one_of(PAGE, "formats", PRECISIONS, DEFAULTS["formats"], t)
    chosen["draft"] = fields.one_of(PAGE, "draft", DRAFTS, DEFAULTS["draft"], t, lambda name: _draft(name, t))
    chosen["policy"] = fields.one_of(PAGE, "policy", BATCHINGS, DEFAULTS["policy"], t)
    chosen["order"] = fields.one_of(PAGE, "order", ORDERS, DEFAULTS["order"], t)
    _numbers(chosen, 3, (("seats", 1, 4096, 16), ("budget", 16, 262_144, 256)), t)
    chosen["prefix"] = fields.switch(PAGE, "prefix", t)
    _numbers(chosen, 3, (("replicas", 1, 64, 1), ("most", 0, 256, 1), ("queue", 1, 1000, 1)), t)
    chosen["router"] = fields.one_of(PAGE, "router", ROUTERS, DEFAULTS["router"], t)
    _numbers(chosen, 3, (("fail_at", 0.0, 1e6, 10), ("fail_for", 1.0, 1e6, 10)), t)
    degrees = (("pre", 0, 64, 1), ("dec", 0, 64, 1), ("pp", 1, 8, 1), ("dp", 1, 32, 1), ("ep", 1, 1024, 1))
    _numbers(chosen, 3, degrees, t)
    chosen["profile"] = fields.choice(PAGE, "profile", list(profiles()), DEFAULTS["profile"], t)


def _draft(name: str, t: Translate) -> str:
    return t("simulate.draft_none") if name == "none" else technique_title(name, t)


def _changed(chosen: Mapping[str, Any], t: Translate) -> str:
    """What stands behind the button and is not as usual."""
    changed = {key: chosen[key] for key in MORE if chosen[key] != DEFAULTS[key]}
    return " · ".join(f"{t(f'{PAGE}.{key}')}{t('sign.colon')}{_shown(key, value, t)}" for key, value in changed.items())


def _shown(key: str, value: Any, t: Translate) -> str:
    if key == "draft":
        return _draft(value, t)
    if isinstance(value, str):
        return t.name(f"{PAGE}.{key}_{value}", value)
    return GOOD if value is True else f"{value:g}"


def _numbers(
    chosen: dict[str, Any], columns: int, numbers: Sequence[tuple[str, float, float, float]], t: Translate
) -> None:
    """Numbers with their least, their largest and their step, in rows of so many."""
    for first in range(0, len(numbers), columns):
        row = numbers[first : first + columns]
        for cell, (key, low, high, step) in zip(st.columns(columns), row, strict=False):
            with cell:
                _number(chosen, key, low, high, t, step)


def _others(chosen: Mapping[str, Any]) -> list[str]:
    """The policies that could decide instead; a router only where there is something to choose."""
    own = {chosen["policy"], chosen["order"], chosen["router"]}
    routed = chosen["replicas"] > 1 or chosen["most"] > 1
    return [name for name, field in POLICIES.items() if name not in own and (routed or field != "cluster.router")]


# --- the scenario ---


def scenario_of(chosen: Mapping[str, Any]) -> Scenario:
    """The scenario that the choices of the form come to; raises MemboundError where they contradict each other."""
    model, device = resolve_model(chosen["model"]), hardware.get_hardware(chosen["hw"])
    formats = list(precisions([chosen["formats"]], model, device, ()))
    if not formats:
        raise MemboundError(f"'{chosen['hw']}' computes in no 8-bit format; choose other formats or another device")
    techniques: list[Any] = [technique.model_dump(mode="json") for technique in formats[0].techniques]
    if chosen["draft"] != "none":
        techniques.append({"name": chosen["draft"]})
    pools = None
    if chosen["pre"] or chosen["dec"]:
        pools = {"prefill_engines": max(1, chosen["pre"]), "decode_engines": max(1, chosen["dec"])}
    return parse_scenario(
        {
            "name": "simulate",
            "model": chosen["model"],
            "hardware": chosen["hw"],
            "parallel": {degree: chosen[degree] for degree in ("tp", "pp", "dp", "ep")},
            "engine": {
                "max_num_seqs": chosen["seats"],
                "max_batched_tokens": chosen["budget"],
                "profile": chosen["profile"],
                "batching": chosen["policy"],
                "order": chosen["order"],
                "prefix_caching": chosen["prefix"],
                "disaggregation": pools,
            },
            "cluster": _cluster(chosen),
            "techniques": techniques,
            "workload": _workload(chosen),
            "slo": {"ttft_s": chosen["ttft"] / 1e3, "tpot_s": chosen["tpot"] / 1e3},
        }
    )


def _cluster(chosen: Mapping[str, Any]) -> dict[str, Any] | None:
    count, most = chosen["replicas"], chosen["most"]
    if count == 1 and most <= 1 and not chosen["fail_at"]:
        return None
    group: dict[str, Any] = {"count": count}
    if most > 1:
        group["autoscaling"] = {
            "min_replicas": min(count, most),
            "max_replicas": max(count, most),
            "target_queue": chosen["queue"],
        }
    failures = None
    if chosen["fail_at"]:
        failures = {"outages": [{"replica": 0, "at_s": chosen["fail_at"], "for_s": chosen["fail_for"]}]}
    return {"router": chosen["router"], "groups": [group], "failures": failures}


def _workload(chosen: Mapping[str, Any]) -> dict[str, Any]:
    kind = chosen["traffic"]
    if kind == "trace":
        return {"arrivals": _trace_arrivals(chosen).model_dump(mode="json"), "requests": chosen["requests"], "seed": 1}
    arrivals: dict[str, Any] = {"kind": "poisson", "rate_rps": chosen.get("rate")}
    if kind == "closed_loop":
        arrivals = {"kind": "closed_loop", "concurrency": chosen["users"]}
    elif kind == "gamma":
        arrivals = {"kind": "gamma", "rate_rps": chosen["rate"], "cv": chosen["cv"]}
    prompts: dict[str, Any] = {"kind": "synthetic", "tokens": _length(chosen, "prompt")}
    if kind == "sessions":
        prompts = {
            "kind": "sessions",
            "tokens": _length(chosen, "prompt"),
            "turns": {"kind": "geometric", "mean": chosen["turns"]},
            "think": {"kind": "exponential", "mean_s": max(chosen["think"], 1e-3)},
            "system_tokens": chosen["system"],
            "context_limit": min(MOST_CONTEXT, models.catalog()[chosen["model"]].max_context),
        }
    return {
        "arrivals": arrivals,
        "requests": chosen["requests"],
        "prompts": prompts,
        "output_tokens": _length(chosen, "output"),
        "seed": 1,
    }


def _length(chosen: Mapping[str, Any], key: str) -> dict[str, Any]:
    tokens = chosen[key]
    if chosen["spread"] == "fixed":
        return {"kind": "fixed", "tokens": tokens}
    return {"kind": "lognormal", "median": tokens, "sigma": SIGMA, "high": 4 * tokens}
