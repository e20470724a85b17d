"""The environment of all tests: a store of their own, two threads, and what a marker needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# With pytest-xdist each worker imports this, too.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
THREADS = "1" if WORKER else "2"


def _private_home() -> Path:
    """A new MEMBOUND_HOME that shares the downloaded weights with the real one, and a worker's compiled kernels."""
    real = Path(os.environ.get("MEMBOUND_HOME") or Path.home() / ".local" / "share" / "membound")
    home = Path(tempfile.mkdtemp(prefix="membound-tests-"))
    try:
        (real / "weights").mkdir(parents=True, exist_ok=True)
        (home / "weights").symlink_to((real / "weights").resolve(), target_is_directory=True)
        if WORKER:
            (real / "kernels").mkdir(exist_ok=True)
            (home / "kernels").symlink_to((real / "kernels").resolve(), target_is_directory=True)
    except OSError:
        (home / "weights").mkdir(exist_ok=True)
    (home / "kernels").mkdir(exist_ok=True)
    return home


# before any test module imports numpy, torch or membound, and inherited by every process a test starts
HOME = _private_home()
os.environ["MEMBOUND_HOME"] = str(HOME)
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = THREADS

# The files of browser tests that open page Plan without a question.
OPEN_PLAN = ("test_accessibility", "test_hostile", "test_simulate_plan", "test_tour")

# Predicting works without torch, and so do its tests.
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if HAS_TORCH else ["kernels", "runtime"]

hypothesis.settings.register_profile("membound", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.load_profile("membound")


def pytest_report_header() -> str | None:
    return None if HAS_TORCH else "torch is not installed: tests/kernels and tests/runtime are left out"


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a run that ends with small ones keeps its workers busy to the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two workers have a browser each, whose dashboards are asked for Plan's long answer in one of them alone."""
    from xdist.scheduler import LoadFileScheduling

    class TwoBrowsers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            if "/browser/" not in f"/{file}":
                return file
            return "browser with Plan" if any(name in file for name in OPEN_PLAN) else "browser"

    return TwoBrowsers(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if item.get_closest_marker("gpu"):
        reason = _why_no_gpu()
        if reason:
            pytest.skip(reason)
    if item.get_closest_marker("browser"):
        from membound.app.commands.doctor import find_browser

        if find_browser() is None:
            reason = "no Chrome or Chromium (Debian: apt-get install chromium, or set CHROME)"
            if os.environ.get("CI") == "true":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)


@pytest.fixture(scope="session")
def stocked() -> Callable[[Path], Path]:
    """Gives a home of a test's own what takes a minute to compile and to download."""

    def stock(home: Path) -> Path:
        for kept in ("kernels", "weights"):
            (home / kept).symlink_to(HOME / kept, target_is_directory=True)
        return home

    return stock


def _why_no_gpu() -> str | None:
    if not HAS_TORCH:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else f"no CUDA device for torch {torch.__version__}"
