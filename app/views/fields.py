"""How does one field of a form look: its words, its help, its default, and its place in the URL?

The words of the field KEY of the page PAGE are `PAGE.KEY`, and the help `PAGE.KEY_help`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import streamlit as st

from membound.app.i18n import Translate
from membound.app.views import linked

Option = TypeVar("Option")


def number(
    page: str, key: str, default: float, low: float, high: float, t: Translate, *, step: float | None = None
) -> float:
    """A number from `low` to `high`; a whole one where the default is."""
    kind = type(default)
    linked.seed(key, _number(kind, low, high), default)
    value = st.number_input(
        t(f"{page}.{key}"),
        min_value=kind(low),
        max_value=kind(high),
        step=kind(step if step is not None else 1),
        format="%d" if kind is int else "%g",
        key=key,
        persist_state="session",
        help=t(f"{page}.{key}_help"),
    )
    linked.keep(key, default)
    return default if value is None else value


def amount(key: str, label: str, default: float, high: float) -> float:
    """A price, whose words are no sentence but a name."""
    linked.seed(key, _number(float, 0.0, high), default)
    value = st.number_input(
        label, min_value=0.0, max_value=high, step=0.1, format="%.2f", key=key, persist_state="session"
    )
    linked.keep(key, default)
    return default if value is None else float(value)


def _number(kind: type[float], low: float, high: float) -> linked.Reader[float]:
    """Reads a number of that kind within bounds."""

    def read(held: Any) -> float | None:
        try:
            value = kind(held)
        except (TypeError, ValueError):
            return None
        return value if math.isfinite(value) and low <= value <= high else None

    return read


def one_of(
    page: str,
    key: str,
    options: Sequence[Option],
    default: Option,
    t: Translate,
    shown: Callable[[Option], str] | None = None,
) -> Option:
    """One of a few options, beside each other; their words are `PAGE.KEY_OPTION` unless `shown` says them."""
    linked.seed(key, linked.one_of(options), default)
    value = st.segmented_control(
        t(f"{page}.{key}"),
        options,
        key=key,
        required=True,
        wrap=True,
        persist_state="session",
        format_func=shown or (lambda option: t(f"{page}.{key}_{option}")),
        help=t(f"{page}.{key}_help"),
    )
    linked.keep(key, default)
    return default if value is None else value


def several(
    page: str, key: str, options: Sequence[str], default: Sequence[str], t: Translate, shown: Callable[[str], str]
) -> list[str]:
    """Some of a few options, beside each other."""
    linked.seed(key, linked.some_of(options), list(default))
    chosen = st.pills(
        t(f"{page}.{key}"),
        options,
        selection_mode="multi",
        key=key,
        wrap=True,
        persist_state="session",
        format_func=shown,
        help=t(f"{page}.{key}_help"),
    )
    linked.keep(key, list(default))
    return [option for option in options if option in chosen]


def many(page: str, key: str, options: Sequence[str], default: Sequence[str], t: Translate) -> list[str]:
    """Some of many options, from a list that can be searched."""
    linked.seed(key, linked.some_of(options), list(default))
    chosen = st.multiselect(
        t(f"{page}.{key}"), options, key=key, persist_state="session", help=t(f"{page}.{key}_help"), max_selections=8
    )
    linked.keep(key, list(default))
    return list(chosen)


def choice(
    page: str,
    key: str,
    options: Sequence[str],
    default: str,
    t: Translate,
    shown: Callable[[str], Any] = str,
) -> str:
    """One of many options, from a list that can be searched."""
    linked.seed(key, linked.one_of(options), default)
    value = st.selectbox(
        t(f"{page}.{key}"),
        options,
        key=key,
        persist_state="session",
        format_func=shown,
        help=t(f"{page}.{key}_help"),
    )
    linked.keep(key, default)
    return str(value or default)


def switch(page: str, key: str, t: Translate) -> bool:
    """On or off; off leaves no trace in the URL."""
    linked.seed(key, linked.one_of((True, False)), False)
    value = st.toggle(t(f"{page}.{key}"), key=key, persist_state="session", help=t(f"{page}.{key}_help"))
    linked.keep(key, False)
    return bool(value)
