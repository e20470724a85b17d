"""Does the tour lead through four pages in a real browser, and do pins stay on the roofline that they were put on?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from membound.app.i18n import Translate
from membound.app.views.tour import STEPS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TIMEOUT_MS = 90_000


@pytest.mark.parametrize(("locale", "language", "width"), [("en-US", "en", 1360), ("zh-CN", "zh", 420)])
def test_the_tour_leads_through_its_pages(session: Callable[..., Any], locale: str, language: str, width: int) -> None:
    t = Translate(language)
    tab = session(locale=locale, viewport={"width": width, "height": 900}).open("/")
    tab.click(t("tour.begin"))
    for step, following in zip(STEPS, [*STEPS[1:], None], strict=True):
        tab.sees(t(f"tour.{step.page}"), TIMEOUT_MS)
        tab.settle()
        if following is not None:
            tab.page.get_by_role("link", name=t("tour.next", page=t(f"nav.{following.page}"))).click()
            tab.page.wait_for_url(re.compile(f"/{following.page}"), timeout=TIMEOUT_MS)
    tab.click(t("tour.done"))
    tab.page.wait_for_function("!location.search.includes('tour')", timeout=TIMEOUT_MS)
    tab.page.get_by_text(t("tour.live")).wait_for(state="detached", timeout=TIMEOUT_MS)
    tab.settle()


def test_a_pinned_configuration_stays_on_the_chart(session: Callable[..., Any]) -> None:
    t = Translate("en")
    tab = session().open("/explore").drawn()
    tab.click(t("pins.pin"))
    tab.page.wait_for_url(re.compile("pins="), timeout=TIMEOUT_MS)
    tab.choose(t("choice.batch"), "64")
    tab.page.wait_for_url(re.compile("batch=64"), timeout=TIMEOUT_MS)
    tab.settle().drawn()
    tab.page.locator(".js-plotly-plot .legendtext", has_text="A: batch 8").wait_for(timeout=TIMEOUT_MS)
    other = session().open(tab.settle().page.url.removeprefix(tab.url)).drawn()
    assert other.page.locator(".js-plotly-plot .legendtext", has_text="A: batch 8").count() == 1
    tab.click(t("pins.remove", mark="A"))
    tab.page.wait_for_function("!location.search.includes('pins')", timeout=TIMEOUT_MS)
    tab.settle()
