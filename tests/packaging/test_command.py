"""Does the installed command start fast, wherever it is called and whatever else is installed?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def strangers(tmp_path: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """An environment in which every bare folder name belongs to somebody else, found first."""
    for name in packages:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('a foreign {name} was imported')\n")
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *([inherited] if inherited else [])])}


def test_help_works_beside_foreign_packages_of_the_same_names(
    membound: Path, run: Callable[..., Any], strangers: dict[str, str], tmp_path: Path, root: Path
) -> None:
    for cwd in (tmp_path, root):
        done = run(membound, "--help", env=strangers, cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout


def test_kernels_import_beside_a_foreign_kernels(run: Callable[..., Any], strangers: dict[str, str]) -> None:
    pytest.importorskip("torch")
    done = run(sys.executable, "-c", "from membound.kernels import base; print(base.__name__)", env=strangers)
    assert done.stdout.strip() == "membound.kernels.base", done.stderr


def test_a_foreign_kernels_stays_importable(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("LayerRepository = object\n")
    code = "import membound.kernels; from kernels import LayerRepository"
    done = run(sys.executable, "-c", code, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_help_takes_less_than_a_second(membound: Path, least_cpu_s: Callable[..., float]) -> None:
    assert least_cpu_s(membound, "--help") < 1.0
