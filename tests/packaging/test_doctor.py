"""Does the doctor say what an issue report needs, also on a machine where much is missing?"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from membound.app.commands import doctor


def printed(found: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(doctor.render(found))
    return out.getvalue()


def test_the_report_is_json_and_no_section_failed() -> None:
    found = json.loads(json.dumps(doctor.report()))
    assert {name: section["error"] for name, section in found.items() if "error" in section} == {}
    assert found["membound"]["version"]
    assert found["machine"]["usable_cores"] >= 1
    assert found["store"]["writable"] is True


def test_every_section_is_printed() -> None:
    found = doctor.report()
    text = printed(found)
    assert all(name in text for name in found)


def test_it_works_without_torch(run: Callable[..., Any]) -> None:
    code = """
import importlib.metadata, json, sys
real = importlib.metadata.version
def version(name):
    if name in ("torch", "triton"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.modules["torch"] = None
from membound.app.commands import doctor
print(json.dumps(doctor.report()))
"""
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"]["version"] is None
    assert not [name for name, section in found.items() if "error" in section]


def test_a_section_that_fails_says_so_and_the_others_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stocked: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(stocked(tmp_path)))
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "local.json").write_text("{")
    found = doctor.report()
    assert "is damaged or from another version (it is not JSON" in found["calibration"]["error"]
    assert found["store"]["path"] == str(tmp_path)
    assert "is damaged" in printed(found)


def test_a_damaged_index_and_fitted_devices_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stocked: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", str(stocked(tmp_path)))
    assert doctor.report()["store"]["runs"] == 0
    (tmp_path / "index.sqlite").write_bytes(b"no database" * 100)
    fits = tmp_path / "calibration" / "devices" / "Mine.json"
    fits.parent.mkdir(parents=True)
    fits.write_text("{}")
    found = doctor.report()
    assert "is damaged" in found["store"]["runs"]
    (told,) = found["calibration"]["devices_fitted_to_tables"]
    assert "Mine.json' is damaged" in told


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is Linux's")
def test_a_home_where_nothing_can_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBOUND_HOME", "/proc")
    store = doctor.report()["store"]
    assert store.get("writable") is False or "error" in store


def test_a_store_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "file" / "home"))
    store = doctor.report()["store"]
    assert store["error"].startswith("Cannot write to ")
    assert store["error"].count(". ") == 0
