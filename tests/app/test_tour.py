"""Does the tour lead a newcomer step by step and out again, and has every chart that a page draws its numbers?"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from membound.app.i18n import LANGUAGES, Translate
from membound.app.views import tables, tour
from membound.roofline.hardware import get_hardware
from membound.roofline.models import get_model
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.techniques import EngineSetup

APP = Path(__file__).parents[2] / "app"
T = Translate("en")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path))
    monkeypatch.setattr("membound.app.views.machine.has_torch", lambda: False)


def _main(**query: str) -> AppTest:
    at = AppTest.from_file(str(APP / "main.py"), default_timeout=60)
    for key, value in query.items():
        at.query_params[key] = value
    return at.run()


def _words(at: AppTest) -> str:
    return "\n".join(str(element.value) for element in at.markdown)


def test_the_tour_begins_at_a_button_and_ends_at_one() -> None:
    at = _main()
    assert T("tour.start") not in _words(at)
    at.button(key="tour_begin").click().run()
    assert T("tour.start") in _words(at) and at.query_params["tour"] in ("1", ["1"])
    at.button(key="tour_close").click().run()
    assert T("tour.start") not in _words(at) and "tour" not in at.query_params


@pytest.mark.parametrize("language", list(LANGUAGES))
def test_every_step_is_one_sentence_or_two_and_says_how_far_it_is(language: str) -> None:
    t = Translate(language)
    for number, step in enumerate(tour.STEPS, start=1):
        at = _main(tour=str(number), lang=language)
        assert not at.exception
        assert t(f"tour.{step.page}") in _words(at)
        assert t("tour.place", number=number, steps=len(tour.STEPS)) in _words(at)


@pytest.mark.parametrize("number", ["0", "99", "-1", "x", ""])
def test_a_link_to_no_step_shows_no_tour(number: str) -> None:
    at = _main(tour=number)
    assert not at.exception and not [button for button in at.button if button.key == "tour_close"]


@pytest.mark.parametrize("source", sorted((APP / "views").glob("*.py")), ids=lambda path: path.stem)
def test_every_chart_has_a_table_with_its_numbers(source: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
    drawn = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "chart"]
    without = [call.lineno for call in drawn if "table" not in {keyword.arg for keyword in call.keywords}]
    assert not without


def test_a_memory_table_adds_up_to_what_can_be_used() -> None:
    point = OperatingPoint(get_model("Llama-3.1-8B"), get_hardware("H100-SXM5"), EngineSetup(), "decode", 8, 2048)
    shares = tables.memory_table(point, T)[T("column.share")]
    assert sum(float(share.removesuffix("%").strip()) for share in shares) == pytest.approx(100, abs=1)


def test_a_live_table_has_the_series_that_were_told() -> None:
    table = tables.live_table([(0.5, {"tokens_per_s": 10.0, "running": 2}), (1.0, {"tokens_per_s": 12.0})], T)
    assert list(table.columns) == [T("live.x"), T("live.tokens_per_s"), T("live.running")]
    assert list(table[T("live.tokens_per_s")]) == [10.0, 12.0]
    assert tables.live_table([], T).empty
