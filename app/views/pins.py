"""Which configurations does a person compare on Explore? The present one and those that were pinned, in the URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from membound.app import text
from membound.app.configurations import Configuration, read, told_apart
from membound.app.figures.comparison import technique_title
from membound.app.figures.moving_roofline import Pinned
from membound.app.figures.roofline import PlacedStep, roofs_of
from membound.app.figures.template import bound_words
from membound.app.i18n import Translate
from membound.app.views import linked
from membound.app.views.devices import device_names, device_title
from membound.roofline.errors import MemboundError
from membound.roofline.operating_point import OperatingPoint

PINS = "pins"
MOST_PINS = 3
LETTERS = "ABC"


@dataclass(frozen=True)
class Row:
    """A configuration of the comparison, and its point, or why it has none."""

    mark: str
    configuration: Configuration
    point: OperatingPoint | None
    problem: str = ""


def pinned() -> list[Configuration]:
    """What was pinned, as the session or the URL holds it."""
    devices = device_names()
    none: list[str] = []
    found = linked.seed(PINS, lambda held: _read(held, devices), none)
    linked.keep(PINS, [])
    return [one for text in found if (one := read(text, devices)) is not None]


def _read(held: str | Sequence[str], devices: Sequence[str]) -> list[str]:
    listed = held.split(",") if isinstance(held, str) else held
    known = dict.fromkeys(text for text in listed if read(text, devices) is not None)
    return list(known)[:MOST_PINS]


def rows(present: Configuration, point: OperatingPoint, t: Translate) -> list[Row]:
    """The present configuration, then the pinned ones by their letters."""
    found = [Row(t("pins.present"), present, point)]
    for letter, configuration in zip(LETTERS, pinned(), strict=False):
        try:
            found.append(Row(letter, configuration, configuration.point()))
        except MemboundError as error:
            found.append(Row(letter, configuration, None, str(error)))
    return found


def placed(compared: Sequence[Row], t: Translate) -> list[Pinned]:
    """The pinned steps as the roofline draws them, with the roofs of devices that are not the present one."""
    present = compared[0].configuration
    titles = _titles(compared, t)
    drawn = []
    for row in compared[1:]:
        if row.point is not None and row.configuration != present:
            elsewhere = row.configuration.device != present.device
            roofs = roofs_of(row.point.hardware) if elsewhere else None
            step = PlacedStep(f"{row.mark}: {titles[row.mark]}", row.mark, row.point.cost)
            drawn.append(Pinned(step, LETTERS.index(row.mark), roofs, device_title(row.configuration.device, t)))
    return drawn


def controls(present: Configuration, compared: Sequence[Row], t: Translate) -> None:
    """The buttons that pin the present configuration and remove pinned ones."""
    known = [row.configuration for row in compared[1:]]
    with st.container(horizontal=True, vertical_alignment="center"):
        full = len(known) >= MOST_PINS
        st.button(
            t("pins.pin"),
            key="pin",
            icon=":material/keep:",
            disabled=full or present in known,
            on_click=_pin,
            args=(present.written(),),
            help=t("pins.full", most=MOST_PINS) if full else t("pins.pin_help", most=MOST_PINS),
        )
        for row in compared[1:]:
            st.button(
                t("pins.remove", mark=row.mark),
                key=f"unpin_{row.mark}",
                icon=":material/close:",
                on_click=_unpin,
                args=(row.configuration.written(),),
            )


def _pin(written: str) -> None:
    st.session_state[PINS] = [*st.session_state.get(PINS, []), written]


def _unpin(written: str) -> None:
    st.session_state[PINS] = [one for one in st.session_state.get(PINS, []) if one != written]


def table(compared: Sequence[Row], t: Translate) -> pd.DataFrame:
    """Step time, rate, bound and memory of each configuration; the present one first."""
    titles = _titles(compared, t)
    present = compared[0].point
    assert present is not None, "the present configuration is drawn"
    return pd.DataFrame([_cells(row, titles[row.mark], present, t) for row in compared])


def _cells(row: Row, title: str, present: OperatingPoint, t: Translate) -> dict[str, str]:
    named = {t("pins.mark"): row.mark, t("pins.configuration"): title}
    if row.point is None:
        return named | {t("metric.step"): row.problem}
    point, cost = row.point, row.point.cost
    bound, share = point.bounds()[0]
    fits = "✓" if point.fits else "✕"
    return named | {
        t("metric.step"): text.seconds(float(cost.time_s)),
        t("column.interval"): f"{text.seconds(float(cost.low_s))} – {text.seconds(float(cost.high_s))}",
        t("column.rate"): text.rate(point.tokens_per_s),
        t("pins.against"): text.gain(point.tokens_per_s / present.tokens_per_s),
        t("column.bound"): f"{bound_words(bound, t)} {text.percent(share)}",
        t("pins.memory"): f"{fits} {text.gib(point.memory.total_bytes)} / {text.gib(point.usable_bytes)}",
    }


def _titles(compared: Sequence[Row], t: Translate) -> dict[str, str]:
    """Each configuration by what tells it from the others."""
    shown = told_apart([row.configuration for row in compared])
    return {row.mark: " · ".join(_said(row.configuration, name, t) for name in shown) for row in compared}


def _said(configuration: Configuration, name: str, t: Translate) -> str:
    value = getattr(configuration, name)
    if name == "techniques":
        return " + ".join(technique_title(one, t) for one in value) or t("explore.plain_step")
    if name == "device":
        return device_title(value, t)
    if name == "phase":
        return t(f"phase.{value}")
    return str(value) if name == "model" else t(f"pins.{name}", number=f"{value:,}")
