"""Which operating point does a person choose on Explore? Every choice is in the URL: a link is the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import streamlit as st

from membound.app import text
from membound.app.configurations import Configuration
from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate
from membound.app.views import fields, linked
from membound.app.views.devices import device_names, device_title
from membound.app.views.form import form
from membound.app.views.session import translate
from membound.roofline import models
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.operating_point import BATCHES, CONTEXTS, PHASES
from membound.roofline.parallel import Parallelism
from membound.roofline.techniques import TECHNIQUES, EngineSetup, engine_setup

MODEL, DEVICE, BATCH, CONTEXT, GAMMA = "Llama-3.1-8B", "H100-SXM5", 8, 2048, 4
GAMMAS = range(1, 17)
DEGREES = (1, 2, 4, 8, 16)
# what a step reads is changed by these; the other layers change which steps there are
STEP_LAYERS = ("weights", "kv")


def configuration() -> Configuration:
    """What the widgets hold."""
    t = translate()
    with form(t) as holds:
        left, middle, right = st.columns([2, 2, 1.6])
        point, below = st.container(horizontal=True), st.container()
        with left:
            model = choose_model(t)
        with middle:
            device = choose_device(t)
        with below:
            techniques = _techniques(t)
        contexts = [context for context in CONTEXTS if context <= model.max_context]
        with point:
            phase = fields.one_of("choice", "phase", PHASES, PHASES[0], t, lambda name: t(f"phase.{name}"))
            context = fields.one_of("choice", "ctx", contexts, min(CONTEXT, contexts[-1]), t, short_count)
            batch = fields.one_of("choice", "batch", BATCHES, BATCH, t, str)
        with right:
            setup = engine_setup([TECHNIQUES[name](name=name) for name in techniques], published=model.published)
            tp = fields.one_of("choice", "tp", divisors(model, setup), 1, t, str)
        gamma = _gamma(t) if phase == "verify" else GAMMA
        titles = t("sign.list").join(technique_title(name, t) for name in techniques)
        of = t("engine.of", model=model.name, device=device_title(device, t))
        at = t("engine.point", batch=batch, context=short_count(context))
        holds(" · ".join(filter(None, (of, t(f"phase.{phase}"), at, titles))))
    return Configuration(model.name, device, phase, context, batch, tp, gamma, tuple(techniques))


def divisors(model: models.ModelSpec, setup: EngineSetup) -> list[int]:
    """The degrees of tensor parallelism that divide a model."""
    return [tp for tp in DEGREES if _divides(model, replace(setup, parallel=Parallelism(tp=tp)))]


def _divides(model: models.ModelSpec, setup: EngineSetup) -> bool:
    try:
        check_parallel(model, setup)
    except MemboundError:
        return False
    return True


def choose_model(t: Translate) -> models.ModelSpec:
    """A model of the catalog."""
    known = models.catalog()
    linked.seed("model", linked.one_of(known), MODEL)
    name = st.selectbox(
        t("choice.model"),
        list(known),
        key="model",
        persist_state="session",
        format_func=_model_title,
    )
    linked.keep("model", MODEL)
    return known[name or MODEL]


@cache
def _model_title(name: str) -> str:
    return f"{name} · {text.digits(models.catalog()[name].params / 1e9)} B"


def choose_device(t: Translate) -> str:
    """This machine, a device of the user's own, or one of the catalog."""
    names = device_names()
    linked.seed("hw", linked.one_of(names), DEVICE)
    name = st.selectbox(
        t("choice.device"),
        names,
        key="hw",
        persist_state="session",
        format_func=lambda name: device_title(name, t),
    )
    linked.keep("hw", DEVICE)
    return name or DEVICE


def _techniques(t: Translate) -> list[str]:
    names = [name for name, technique in TECHNIQUES.items() if technique.layer in STEP_LAYERS]
    others = t("sign.list").join(technique_title(name, t) for name in TECHNIQUES if name not in names)
    return some_techniques("with", names, (), t("choice.techniques"), t("choice.techniques_help", others=others), t)


def some_techniques(
    key: str, names: Iterable[str], default: Sequence[str], label: str, help: str, t: Translate
) -> list[str]:
    """Some of these techniques, in the order in which they were chosen."""
    known = list(names)
    linked.seed(key, linked.some_of(known), list(default))
    chosen: list[str] = st.pills(
        label,
        known,
        selection_mode="multi",
        key=key,
        wrap=True,
        persist_state="session",
        format_func=lambda name: technique_title(name, t),
        help=help,
    )
    linked.keep(key, list(default))
    return chosen


def _gamma(t: Translate) -> int:
    linked.seed("gamma", linked.one_of(GAMMAS), GAMMA)
    gamma = st.slider(
        t("choice.gamma"), GAMMAS[0], GAMMAS[-1], key="gamma", persist_state="session", help=t("choice.gamma_help")
    )
    linked.keep("gamma", GAMMA)
    return int(gamma)


def short_count(context: int) -> str:
    """`2048` as "2k"."""
    return f"{context // 1024}k" if context >= 1024 else str(context)
