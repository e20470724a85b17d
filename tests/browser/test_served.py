"""Does a person measure their own server from Live, in a real browser, and see it beside its prediction?"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membound.app.i18n import Translate

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FAKE = Path(__file__).parents[1] / "runtime" / "endpoint" / "conftest.py"
SHORT = (Path(__file__).parent / "short.yaml").read_text("utf-8")
EN, ZH = Translate("en"), Translate("zh")
TIMEOUT_MS = 120_000


@pytest.fixture(scope="module")
def fake() -> Any:
    """The fake server of the endpoint's own tests."""
    spec = importlib.util.spec_from_file_location("fake_endpoint", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _fill(tab: Any, label: str, words: str) -> None:
    field = tab.page.get_by_label(label, exact=True).first
    field.fill(words)
    field.press("Enter")
    tab.settle()


@pytest.mark.parametrize(("locale", "t"), [("en-US", EN), ("zh-CN", ZH)])
def test_a_server_is_measured_beside_its_prediction(
    session: Callable[..., Any], fake: Any, locale: str, t: Translate
) -> None:
    with fake.serving(lambda exchange: fake.well(exchange, gap_s=0.01)) as server:
        tab = session(locale=locale).open("/live?scenario=own&machine=endpoint&taken=H100-SXM5")
        draft = tab.page.get_by_label(t("live.paste"))
        draft.fill(SHORT)
        draft.press("Control+Enter")
        tab.sees(t("live.endpoint_empty"))
        _fill(tab, t("live.endpoint"), "ftp://nowhere")
        tab.page.locator("[data-testid=stAlert]", has_text="ftp://nowhere").wait_for(timeout=TIMEOUT_MS)
        _fill(tab, t("live.endpoint"), server.url)
        tab.click(t("live.run"))
        tab.page.wait_for_url(re.compile("job="), timeout=TIMEOUT_MS)
        tab.sees(t("served.title"), TIMEOUT_MS)
        tab.drawn(TIMEOUT_MS)
        tab.settle()
        again = session(locale=locale).open(tab.page.url.removeprefix(tab.url))
        again.sees(t("served.title"), TIMEOUT_MS)
        again.check()


def test_a_server_that_is_not_there_is_one_sentence(session: Callable[..., Any]) -> None:
    tab = session().open("/live?scenario=plan-70b&kind=measure&machine=endpoint&endpoint=http://127.0.0.1:9")
    tab.click(EN("live.run"))
    tab.page.locator("[data-testid=stAlert]", has_text="127.0.0.1:9").wait_for(timeout=TIMEOUT_MS)
    tab.settle()
