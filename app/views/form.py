"""How does a page's form stand: open on a wide screen; on a phone behind a line that says what it holds, so that the
page's answer comes first?

Which of the two is a matter of the screen's width, and so of `assets/page.css`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import streamlit as st

from membound.app import text
from membound.app.i18n import Translate


@contextmanager
def form(t: Translate) -> Iterator[Callable[[str], None]]:
    """The form of a page; what it yields is told what the form holds."""
    with st.container(border=True, key="form"):
        with st.container(key="form_line", horizontal=True, vertical_alignment="center", gap="small"):
            held = st.container(width="stretch")
            st.toggle(t("form.change"), key="form_open", on_change="ignore")

        def holds(words: str) -> None:
            held.markdown(text.plain(words))

        yield holds
