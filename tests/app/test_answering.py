"""Is a kept answer asked for again once somebody else would answer: other code, other fits, another device?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from membound.app import answering
from membound.app.answering import sources_of, who_answers
from membound.app.views import asked, background

CALIBRATION = Path(__file__).with_name("calibration.json")
SHEET = "name: Mine\nvendor: me\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("MEMBOUND_HOME", str(folder))
    return folder


def _written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _calibrated(home: Path) -> None:
    _written(home / "calibration" / "local.json", CALIBRATION.read_text())


def _fitted(home: Path) -> None:
    _written(home / "calibration" / "devices" / "H100-SXM5.json", "{}")


def _described(home: Path) -> None:
    _written(home / "hardware" / "mine.yaml", SHEET)


def _described_otherwise(home: Path) -> None:
    _written(home / "hardware" / "mine.yaml", f"{SHEET}aliases: [Ours]\n")


def test_nothing_changes_where_nothing_changed(home: Path) -> None:
    assert who_answers() == who_answers()
    _calibrated(home)
    _fitted(home)
    _described(home)
    assert who_answers() == who_answers()


@pytest.mark.parametrize("change", [_calibrated, _fitted, _described, _described_otherwise])
def test_a_question_is_new_after_a_calibration_a_fit_or_a_sheet(home: Path, change: Callable[[Path], None]) -> None:
    if change is _described_otherwise:
        _described(home)
    before, question = who_answers(), asked.digest_of("plan", {"scenario": "a"})
    change(home)
    assert who_answers() != before and asked.digest_of("plan", {"scenario": "a"}) != question


def test_a_question_is_new_after_other_code_or_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sources"
    _written(folder / "physics" / "roof.py", "ROOF = 1\n")
    before = sources_of([folder])
    _written(folder / "__pycache__" / "roof.pyc", "compiled")
    assert sources_of([folder]) == before
    _written(folder / "physics" / "roof.py", "ROOF = 10\n")
    changed = sources_of([folder])
    shutil.copy(folder / "physics" / "roof.py", folder / "physics" / "roofs.py")
    assert len({before, changed, sources_of([folder])}) == 3
    question = asked.digest_of("plan", {"scenario": "a"})
    monkeypatch.setattr(answering, "_SOURCES", changed)
    assert asked.digest_of("plan", {"scenario": "a"}) != question


def test_a_process_beside_the_server_is_asked_again_after_a_change(home: Path) -> None:
    first = background.ask("a key", sum, (1, 2))
    assert background.ask("a key", sum, (1, 2)) is first
    _fitted(home)
    assert background.ask("a key", sum, (1, 2)) is not first
    assert first.result(timeout=120) == 3
