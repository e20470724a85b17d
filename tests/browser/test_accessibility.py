"""Does every page open and fit, and can people who see little, or use no mouse, use it, as axe-core judges?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate
from membound.app.keeping import keep_run
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.scenario import parse_scenario
from membound.simulator.run import run as simulate

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# pages that answer unasked, with a chart, and pages that wait for a question
ANSWERING = ("start", "explore", "techniques", "stack", "simulate", "plan", "validate")
PAGES = (*ANSWERING, "advisor", "live", "experiments")
NARROW = {"width": 400, "height": 800}
SERIOUS = ("serious", "critical")
ANSWER_TIMEOUT_MS = 300_000


def _serious(page: Any) -> Iterator[str]:
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    for violation in found["violations"]:
        for node in violation["nodes"] if violation["impact"] in SERIOUS else ():
            target = " ".join(str(part) for part in node["target"])
            yield f"{violation['id']}: {target}: {node['html'][:200]}: {node['failureSummary'][:300]}"


@pytest.mark.parametrize(("language", "locale", "scheme"), [("en", "en-US", "light"), ("zh", "zh-CN", "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_and_fits_and_axe_finds_nothing_serious_wide_and_narrow(
    session: Callable[..., Any], name: str, language: str, locale: str, scheme: str
) -> None:
    tab = session(locale=locale, color_scheme=scheme)
    tab.open("/" if name == "start" else f"/{name}").sees(Translate(language)(f"{name}.title"))
    tab.page.wait_for_function(f"document.documentElement.lang === '{language}'", timeout=ANSWER_TIMEOUT_MS)
    if name in ANSWERING:
        tab.drawn(ANSWER_TIMEOUT_MS)
    tab.settle()
    found = list(_serious(tab.page))
    assert not found, "\n".join(found)
    tab.fits()
    tab.page.set_viewport_size(NARROW)
    tab.fits()
    found = list(_serious(tab.page))
    assert not found, "\n".join(found)


def test_axe_finds_what_nobody_can_read_or_name(session: Callable[..., Any]) -> None:
    tab = session().open("/experiments")
    bad = "<p style='color: #bbb; background: #fff'>too faint</p><button></button>"
    tab.page.evaluate(
        "(bad) => document.querySelector('.stMainBlockContainer').insertAdjacentHTML('afterbegin', bad)", bad
    )
    assert {found.partition(":")[0] for found in _serious(tab.page)} == {"color-contrast", "button-name"}


PINS = "Llama-3.1-8B:H100-SXM5:decode:2048:1:1:4:,Llama-3.1-8B:RTX-4090:decode:2048:8:1:4:int8_weights"
STATES = {
    "a server": "/live?scenario=plan-70b&machine=endpoint&endpoint=http://127.0.0.1:8000",
    "pins": f"/explore?pins={PINS}",
    "the tour": "/explore?tour=2",
    "two runs": "/live?a={a}&b={b}",
}


@pytest.mark.parametrize(("locale", "scheme"), [("en-US", "light"), ("zh-CN", "dark")])
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing_serious_in(
    session: Callable[..., Any], dashboard: Any, state: str, locale: str, scheme: str
) -> None:
    path = STATES[state]
    if state == "two runs":
        path = path.format(a=_measured(dashboard, batch=4), b=_measured(dashboard, batch=8))
    tab = session(locale=locale, color_scheme=scheme).open(path)
    tab.page.wait_for_function("document.documentElement.lang", timeout=ANSWER_TIMEOUT_MS)
    if state != "a server":
        tab.drawn(ANSWER_TIMEOUT_MS)
    tab.settle()
    found = list(_serious(tab.page))
    assert not found, "\n".join(found)


def _measured(dashboard: Any, batch: int) -> str:
    """A run of the simulator in the dashboard's store."""
    document = parse_yaml((Path(__file__).parent / "short.yaml").read_text("utf-8"), "short.yaml")
    document |= {"hardware": "H100-SXM5", "weights": "random"}
    document["engine"]["max_num_seqs"] = batch
    scenario = parse_scenario(document)
    return keep_run(dashboard.store, "simulate", scenario, simulate(scenario))
