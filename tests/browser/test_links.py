"""Does a link inside the dashboard ask what it says, whatever was chosen before, and does a choice outlive a visit?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from membound.app.i18n import Translate

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Session = Callable[..., Any]
EN = Translate("en")
PAGE_TIMEOUT_MS = 60_000


def _go(tab: Any, page: str) -> None:
    """By the menu at the top."""
    tab.page.get_by_role("link", name=EN(f"nav.{page}"), exact=True).first.click(timeout=PAGE_TIMEOUT_MS)
    tab.page.wait_for_url(re.compile(rf"/{page}|/$|/\?") if page == "start" else re.compile(rf"/{page}"))
    tab.sees(EN(f"{page}.title"))
    tab.settle()


def _follow(tab: Any, words: str, page: str) -> None:
    tab.page.get_by_role("link", name=words).first.click(timeout=PAGE_TIMEOUT_MS)
    tab.sees(EN(f"{page}.title"))
    tab.settle()


def test_a_question_of_start_is_answered_for_its_own_batch(session: Session) -> None:
    tab = session().open("/explore")
    tab.choose(EN("choice.batch"), "4")
    tab.settle()
    tab.choose(EN("choice.batch"), "8")
    tab.settle()
    _go(tab, "start")
    _follow(tab, EN("start.ask_techniques"), "techniques")
    tab.answers("batch 32")
    tab.chosen(EN("choice.batch"), "32")
    tab.at("batch=32")
    tab.choose(EN("choice.batch"), "16")
    tab.settle()
    tab.at("batch=16")
    tab.chosen(EN("choice.batch"), "16")
    _go(tab, "stack")
    tab.at("batch=16")
    tab.chosen(EN("choice.batch"), "16")


def test_the_machine_of_start_is_explored_as_it_is_drawn(session: Session) -> None:
    tab = session().open("/explore?model=Llama-3.1-70B&batch=64")
    _go(tab, "start")
    _follow(tab, EN("machine.explore"), "explore")
    tab.at("model=SmolLM2-135M", "hw=local")
    tab.chosen(EN("choice.batch"), "1")


def test_a_pasted_scenario_outlives_a_visit_to_simulate(session: Session) -> None:
    tab = session().open("/live?scenario=own")
    draft = tab.page.get_by_label(EN("live.paste"))
    draft.fill("name: mine\n")
    draft.press("Control+Enter")
    tab.settle()
    _go(tab, "simulate")
    _go(tab, "live")
    assert tab.page.get_by_label(EN("live.paste")).input_value() == "name: mine\n"
