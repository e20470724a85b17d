"""Do the pages share their choices as they should: by the session, by the address, and no two meanings by one key?"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pages import open_page
from streamlit.testing.v1 import AppTest

from membound.app import jobs
from membound.app.views import background

APP = Path(__file__).parents[2] / "app"
WIDGETS = ("selectbox", "multiselect", "segmented_control", "pills", "number_input", "slider", "toggle", "text_area")
# Each page, and what its address says where that brings up other fields.
PAGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("explore", {"phase": "verify"}),
    ("techniques", {}),
    ("stack", {}),
    ("advisor", {}),
    ("plan", {}),
    ("plan", {"plan_load": "closed"}),
    ("live", {"scenario": "own"}),
    ("experiments", {}),
    ("validate", {"against": "machine"}),
    ("simulate", {"from": "own"}),
    ("simulate", {"traffic": "closed_loop"}),
    ("simulate", {"traffic": "gamma"}),
    ("simulate", {"traffic": "sessions"}),
    ("simulate", {"traffic": "trace"}),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home whose pages start no worker and no process."""
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr(background, "ask", _asked_here)
    monkeypatch.setattr(jobs, "submit", lambda store, kind, spec, owner="": store.submit_job(kind, spec, owner))
    return tmp_path


def _asked_here(key: object, function: Callable[..., Any], *arguments: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(function(*arguments))
    return future


def _widgets(at: AppTest) -> Iterator[tuple[str, tuple[str, frozenset[str]]]]:
    """The key of each widget, with its kind and its options as they are shown."""
    for kind in WIDGETS:
        for widget in at.get(kind) if kind not in ("segmented_control", "pills") else getattr(at, kind):
            if widget.key:
                yield widget.key, (kind, frozenset(getattr(widget, "options", ())))


def test_no_two_pages_give_one_key_two_meanings(home: Path) -> None:
    """A key is the session's: a page that knows other options drops what was chosen, or pasted, on another one."""
    held: dict[str, tuple[str, str, frozenset[str]]] = {}
    for name, query in PAGES:
        at = open_page(name, **query)
        assert not at.exception
        for key, (kind, options) in _widgets(at):
            page, other_kind, others = held.setdefault(key, (name, kind, options))
            assert kind == other_kind, f"'{key}' is a {other_kind} on {page} and a {kind} on {name}"
            assert options <= others or others <= options, f"'{key}' has other options on {page} than on {name}"
    assert {"batch", "model", "draft", "draft_live"} <= set(held)


def _held(choices: dict[str, Any], **query: str) -> Any:
    """What the widget `batch` holds after the session chose, in an address that opens another page."""
    at = AppTest.from_string(
        "import streamlit as st\n"
        "from membound.app.i18n import Translate\n"
        "from membound.app.views import fields, linked\n"
        "linked.arrive(st.session_state['page'])\n"
        "fields.one_of('choice', 'batch', (1, 4, 8, 32), 8, Translate('en'), str)\n"
    )
    at.session_state["page"] = "first"
    at.run()
    if "batch" in choices:
        at.segmented_control(key="batch").set_value(choices["batch"]).run()
        assert at.query_params["batch"] == str(choices["batch"])
    at.session_state["page"] = "second"
    at.query_params.clear()
    at.query_params.update(query)
    return at.run().session_state["batch"]


def test_the_address_that_opens_a_page_wins_over_what_was_chosen_on_another() -> None:
    assert _held({"batch": 4}, batch="32") == 32
    assert _held({}, batch="32") == 32


def test_what_was_chosen_holds_where_the_address_says_nothing_that_the_page_knows() -> None:
    assert _held({"batch": 4}) == 4
    assert _held({"batch": 4}, batch="7") == 4
    assert _held({}) == 8


def test_a_choice_on_an_open_page_wins_over_the_address_that_opened_it() -> None:
    at = open_page("explore", batch="32")
    assert at.segmented_control(key="batch").value == 32
    at.segmented_control(key="batch").set_value(4).run()
    at.query_params["batch"] = "32"  # as a browser sends it that has not yet been told of the choice
    assert at.run().segmented_control(key="batch").value == 4


@pytest.mark.parametrize("source", sorted((APP / "views").glob("*.py")), ids=lambda path: path.stem)
def test_a_heading_has_an_anchor_of_its_own(source: Path) -> None:
    """So a link to it holds in both languages, and the browser need not make one of its words at each drawing: that
    took it a twelfth of its time on Techniques."""
    calls = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
    headings = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("title", "header", "subheader")
        and ast.unparse(call.func.value) != "text"
        and call.args
    ]
    assert not [call.lineno for call in headings if "anchor" not in {keyword.arg for keyword in call.keywords}]
