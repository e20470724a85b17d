"""How does a link reproduce a page? Each choice is seeded from the URL and written back to it.

Streamlit's own `bind="query-params"` writes an option as it is shown, so a link would break with the reader's language.
"""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st


def seed(key: str, options: Sequence[object], default: object) -> None:
    """Before the widget `key`: give it what the session chose, else what the URL says, else the default."""
    known = {str(option): option for option in options}
    value = st.session_state.get(key, known.get(st.query_params.get(key, "")))
    st.session_state[key] = value if value in options else default


def seed_several(key: str, options: Sequence[str]) -> None:
    """The same for a widget that holds several options, separated by commas in the URL."""
    value = st.session_state.get(key, st.query_params.get(key, "").split(","))
    st.session_state[key] = [option for option in value if option in options]


def keep(key: str, default: object) -> None:
    """After the widget `key`: write what it holds to the URL, where a default leaves no trace."""
    value = st.session_state[key]
    written = ",".join(value) if isinstance(value, list) else str(value)
    if value in (default, []):
        st.query_params.pop(key, None)
    elif st.query_params.get(key) != written:
        st.query_params[key] = written
