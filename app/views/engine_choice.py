"""Which engine, under which load, does a person look at on Techniques, Stack, Advisor? Every choice is in the URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import streamlit as st

from membound.app import text
from membound.app.engine_choice import ANY_TASK, AUTO, CACHES, WEIGHTS, EngineChoice, contexts_of, lengths_at
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.views import fields
from membound.app.views.choices import (
    BATCH,
    CONTEXT,
    choose_device,
    choose_model,
    divisors,
    short_count,
)
from membound.roofline import hardware
from membound.roofline.operating_point import BATCHES
from membound.roofline.scenario.workload import TaskName
from membound.roofline.techniques import EngineSetup, GainMetric
from membound.roofline.times.engines import profiles

PROFILE, TASK = "graphs", "chat"
TASKS = (*get_args(TaskName), ANY_TASK)
METRICS: tuple[GainMetric, ...] = ("output_tokens_per_s", "tpot_s")


def choose_engine(t: Translate, *, formats: bool = False, more: Callable[[], None] = lambda: None) -> EngineChoice:
    """The engine that the widgets hold, with the formats that quantization is to have where they matter.

    What most people leave as it is stands behind a button, with what `more` draws there, and in a line of words below.
    Raises MemboundError where the device cannot be had.
    """
    left, middle, right = st.columns([2, 2, 1], vertical_alignment="bottom")
    with left:
        model = choose_model(t)
    with middle:
        device = hardware.get_hardware(choose_device(t)).name
    contexts = contexts_of(model)
    with st.container(horizontal=True):
        batch = fields.one_of("choice", "batch", BATCHES, BATCH, t, str)
        context = fields.one_of("choice", "ctx", contexts, min(CONTEXT, contexts[-1]), t, short_count)
    with right.popover(t("engine.more"), icon=":material/tune:", width="stretch"):
        tp = fields.one_of("choice", "tp", divisors(model, EngineSetup(precision=model.published)), 1, t, str)
        metric = fields.one_of("choice", "gain", METRICS, METRICS[0], t, lambda name: t(f"short.{name}"))
        task = fields.one_of("choice", "task", TASKS, TASK, t, lambda name: t(f"engine.{name}_task"))
        profile = fields.choice("choice", "profile", list(profiles()), PROFILE, t)
        weights = _format("weights", WEIGHTS, t) if formats else AUTO
        cache = _format("kv", CACHES, t) if formats else AUTO
        more()
    choice = EngineChoice(model.name, device, tp, profile, batch, context, metric, task, weights, cache)
    st.caption(_more_chosen(choice, t))
    return choice


def in_short(choice: EngineChoice, t: Translate, techniques: Sequence[str] = ()) -> str:
    """The choice in a line: the model on the device at its point, with techniques if there are some."""
    parts = [
        t("engine.of", model=choice.model_name, device=_device(choice, t)),
        t("engine.point", batch=choice.batch, context=short_count(choice.context)),
        t("sign.list").join(technique_title(name, t) for name in techniques),
    ]
    return " · ".join(part for part in parts if part)


def _device(choice: EngineChoice, t: Translate) -> str:
    device = t("device.local") if choice.device_name == "local" else choice.device_name
    return f"{choice.tp} × {device}" if choice.tp > 1 else device


def _more_chosen(choice: EngineChoice, t: Translate) -> str:
    """What stands behind the button, formats where they were chosen."""
    chosen = [
        t("engine.devices", devices=choice.tp),
        t("engine.profile", profile=choice.profile),
        t("engine.content", task=t(f"engine.{choice.task}_task")),
        t("engine.metric", metric=t(f"short.{choice.metric}")),
    ]
    for key, name in (("weights", choice.weights), ("kv", choice.kv)):
        if name != AUTO:
            chosen.append(f"{t(f'choice.{key}')}{t('sign.colon')}{_format_title(name, t)}")
    return text.plain(" · ".join(chosen))


def _format(key: str, formats: Sequence[str], t: Translate) -> str:
    return fields.choice("choice", key, formats, AUTO, t, lambda name: _format_title(name, t))


def _format_title(name: str, t: Translate) -> str:
    return t("engine.auto") if name == AUTO else name.replace("/", " + ")


def conditions(choice: EngineChoice, t: Translate) -> str:
    """Where numbers hold, for captions."""
    lengths = lengths_at(choice.context)
    return t(
        "engine.conditions",
        model=choice.model_name,
        devices=_device(choice, t),
        batch=choice.batch,
        context=f"{choice.context:,}",
        prompt=f"{lengths.prompt_tokens:,.0f}",
        output=f"{lengths.output_tokens:,.0f}",
        profile=choice.profile,
        task=t(f"engine.{choice.task}_task"),
        techniques=t("sign.list").join(technique_title(name, t) for name in choice.techniques) or t("stack.none"),
    )
