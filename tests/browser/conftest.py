"""The dashboard's server with a store of its own, and tabs of real browser sessions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Dashboard, Tab, opened_chromium

CALIBRATION = Path(__file__).parents[1] / "app" / "calibration.json"


def _alone(home: Path, **environment: str) -> Dashboard:
    """A dashboard whose measurements wait for no other's."""
    return Dashboard(home, MEMBOUND_SLOT=str(home / "slot.lock"), **environment)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with opened_chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory, stocked: Callable[[Path], Path]) -> Iterator[Dashboard]:
    """A dashboard on a calibrated machine, whose store has what earlier tests asked: the long answers come once."""
    home = stocked(tmp_path_factory.mktemp("home"))
    (home / "calibration").mkdir()
    shutil.copy(CALIBRATION, home / "calibration" / "local.json")
    running = _alone(home)
    yield running
    running.end()


@pytest.fixture
def uncalibrated(tmp_path: Path, stocked: Callable[[Path], Path]) -> Iterator[Callable[..., Dashboard]]:
    """Starts a dashboard with this environment on a machine that nobody has measured; all end with the test."""
    started = []

    def start(**environment: str) -> Dashboard:
        started.append(_alone(stocked(tmp_path), **environment))
        return started[-1]

    yield start
    for running in started:
        running.end()


@pytest.fixture
def session(chromium: Any, dashboard: Dashboard) -> Iterator[Callable[..., Tab]]:
    """Opens a tab of a new session, of another dashboard if given; all end with the test."""
    contexts = []

    def opened(server: Dashboard = dashboard, **options: Any) -> Tab:
        known = {"locale": "en-US", "viewport": {"width": 1360, "height": 900}}
        contexts.append(chromium.new_context(**(known | options)))
        return Tab(contexts[-1], server)

    yield opened
    for context in contexts:
        context.close()
