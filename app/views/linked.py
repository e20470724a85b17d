"""How does a link reproduce a page? Each choice is seeded from the URL and written back to it.

Streamlit's own `bind="query-params"` writes an option as it is shown, so a link would break with the reader's language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import streamlit as st

Value = TypeVar("Value")
# What a text of the URL, or what the session holds from another page, means for a widget; None where it means nothing.
Reader = Callable[[Any], Value | None]
# In the session: the page that is open, and the keys that were seeded since it was opened.
OPEN, SEEDED = "linked_page", "linked_keys"


def arrive(page: str) -> None:
    """At the start of each run: the address that opens a page is what was asked for, whatever was chosen before."""
    if st.session_state.get(OPEN) != page:
        st.session_state[OPEN], st.session_state[SEEDED] = page, set()


def seed(key: str, read: Reader[Value], default: Value) -> Value:
    """Before the widget `key`: give it what the URL said as the page was opened, else what the session chose, else the
    default."""
    value = None
    if key not in st.session_state.setdefault(SEEDED, set()):
        st.session_state[SEEDED].add(key)
        value = read(st.query_params[key]) if key in st.query_params else None
    if value is None and key in st.session_state:
        value = read(st.session_state[key])
    st.session_state[key] = default if value is None else value
    return default if value is None else value


def one_of(options: Iterable[Value]) -> Reader[Value]:
    """Reads an option."""
    known = {str(option): option for option in options}
    return lambda held: known.get(str(held))


def some_of(options: Iterable[str]) -> Reader[list[str]]:
    """Reads several options, which commas separate in the URL."""
    known = set(options)

    def read(held: str | Sequence[str]) -> list[str]:
        listed = held.split(",") if isinstance(held, str) else held
        return [option for option in listed if option in known]

    return read


def keep(key: str, default: object) -> None:
    """After the widget `key`: write what it holds to the URL, where a default leaves no trace."""
    value = st.session_state[key]
    written = ",".join(value) if isinstance(value, list) else str(value)
    if value == default:
        st.query_params.pop(key, None)
    elif st.query_params.get(key) != written:
        st.query_params[key] = written
