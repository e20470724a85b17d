"""How does a test look at a page? Opened by its address, and read as its words."""

from __future__ import annotations

import html
import re

from streamlit.testing.v1 import AppTest


def open_page(name: str, **query: str) -> AppTest:
    """The page of that name, run once with what its address says; it must not fail."""
    at = AppTest.from_string(f"from membound.app.views import {name}\n{name}.page()", default_timeout=60)
    for key, value in query.items():
        at.query_params[key] = value
    at.run()
    assert not at.exception
    return at


def words_of(at: AppTest) -> str:
    """All that a page says, a line each."""
    shown = [*at.title, *at.header, *at.markdown, *at.caption, *at.info, *at.warning, *at.error, *at.text]
    written = [html.unescape(re.sub(r"<[^>]+>", " ", str(element.body))) for element in at.html]
    return "\n".join([*(str(element.value) for element in shown), *written])
