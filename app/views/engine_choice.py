"""Which engine, under which load, does a person look at on Techniques, Stack, Advisor? Every choice is in the URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import streamlit as st

from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.views import linked
from membound.app.views.choices import (
    BATCH,
    CONTEXT,
    choose_device,
    choose_model,
    divisors,
    one_of,
    short_count,
)
from membound.roofline import hardware
from membound.roofline.engines import profiles
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec
from membound.roofline.models import ModelSpec
from membound.roofline.operating_point import BATCHES, CONTEXTS
from membound.roofline.scenario import Scenario, parse_scenario
from membound.roofline.techniques import EngineSetup, GainMetric
from membound.roofline.workload import Workload
from membound.simulator.steady import Lengths, Load, check_context

PROFILE = "graphs"
METRICS: tuple[GainMetric, ...] = ("output_tokens_per_s", "tpot_s")
# What every engine of today has, and what a technique is added to.
ENGINE = ("continuous_batching",)
# Outputs differ in length, as those of people do; the prompt is as long as the chosen context leaves it.
WORKLOAD: dict[str, Any] = {
    "requests": 2000,
    "prompts": {"kind": "synthetic", "tokens": {"kind": "fixed", "tokens": 64}},
    "output_tokens": {"kind": "uniform", "low": 32, "high": 480},
    "seed": 1,
}


@dataclass(frozen=True)
class EngineChoice:
    """An engine at an operating point, and what gains are of."""

    model: ModelSpec
    device: HardwareSpec
    tp: int
    profile: str
    batch: int
    context: int
    metric: GainMetric
    techniques: tuple[str, ...] = ENGINE

    @property
    def scenario(self) -> Scenario:
        """The engine with as many clients in a closed loop as the batch has sequences."""
        arrivals = {"kind": "closed_loop", "concurrency": self.batch}
        return parse_scenario(
            {
                "name": "dashboard",
                "model": self.model.name,
                "hardware": self.device.name,
                "parallel": {"tp": self.tp},
                "engine": {"profile": self.profile, "max_num_seqs": BATCHES[-1]},
                "techniques": list(self.techniques),
                "workload": {"arrivals": arrivals, **WORKLOAD},
            }
        )

    @property
    def load(self) -> Load:
        return Load(float(self.batch), lengths_at(self.context))

    @property
    def contexts(self) -> list[int]:
        """The contexts that the model was made for."""
        return contexts_of(self.model)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells its results from those of others; a calibration that is measured again is another device."""
        created = self.device.calibration.created if self.device.calibration else ""
        return (self.model.name, self.device.name, created, self.tp, self.profile, self.techniques)

    def at(self, *, batch: int | None = None, context: int | None = None) -> EngineChoice:
        """The same engine elsewhere."""
        return replace(self, batch=batch or self.batch, context=context or self.context)

    def having(self, techniques: Sequence[str]) -> EngineChoice:
        """The same with an engine that has these techniques."""
        return replace(self, techniques=tuple(techniques))

    def conditions(self, t: Translate) -> str:
        """Where numbers hold, for captions."""
        lengths = lengths_at(self.context)
        return t(
            "engine.conditions",
            model=self.model.name,
            devices=f"{self.tp} × {self.device.name}" if self.tp > 1 else self.device.name,
            batch=self.batch,
            context=f"{self.context:,}",
            prompt=f"{lengths.prompt_tokens:,.0f}",
            output=f"{lengths.output_tokens:,.0f}",
            profile=self.profile,
            techniques=", ".join(technique_title(name, t) for name in self.techniques) or t("stack.none"),
        )


@cache
def _sample() -> Lengths:
    arrivals = {"kind": "closed_loop", "concurrency": 1}
    return Lengths.of(Workload.model_validate({"arrivals": arrivals, **WORKLOAD}))


@cache
def lengths_at(context: int) -> Lengths:
    """Prompts and outputs with which a decode step attends to so many tokens on average."""
    return _sample().at_context(context)


def contexts_of(model: ModelSpec) -> list[int]:
    """The contexts at which prompt and output are within what the model was made for."""
    return [context for context in CONTEXTS if _within(model, context)] or [CONTEXTS[0]]


def _within(model: ModelSpec, context: int) -> bool:
    try:
        check_context(model, lengths_at(context))
    except MemboundError:
        return False
    return True


def choose_engine(t: Translate) -> EngineChoice:
    """The engine that the widgets hold; raises MemboundError where its device cannot be had."""
    left, middle, right = st.columns([2, 2, 1])
    with left:
        model = choose_model(t)
    with middle:
        name = choose_device(t)
    with right:
        profile = _profile(t)
    contexts = contexts_of(model)
    with st.container(horizontal=True):
        batch = one_of("batch", BATCHES, BATCH, t, str)
        context = one_of("ctx", contexts, min(CONTEXT, contexts[-1]), t, short_count)
        tp = one_of("tp", divisors(model, EngineSetup(precision=model.published)), 1, t, str)
        metric = one_of("gain", METRICS, METRICS[0], t, lambda name: t(f"short.{name}"))
    return EngineChoice(model, hardware.get_hardware(name), tp, profile, batch, context, metric)


def _profile(t: Translate) -> str:
    names = list(profiles())
    linked.seed("profile", names, PROFILE)
    name = st.selectbox(t("choice.profile"), names, key="profile", persist_state="session", help=t("help.profile"))
    linked.keep("profile", PROFILE)
    return name or PROFILE
