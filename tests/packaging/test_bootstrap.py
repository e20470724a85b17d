"""Does the set-up refuse what it cannot do in one sentence, and do nothing twice?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """The files of the set-up alone, without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/bootstrap.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def test_an_unknown_torch_choice_is_one_sentence_and_exit_2(checkout: Path, run: Callable[..., Any]) -> None:
    done = run(checkout / ".ci" / "bootstrap.sh", "setup", env={"TORCH": "gpu"})
    assert done.returncode == 2
    assert done.stderr == "TORCH=gpu is not known; use auto, cpu, cuda or none.\n"
    assert not (checkout / ".venv").exists()


def test_without_a_python_it_says_what_is_needed(checkout: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "cat"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    done = run(checkout / ".ci" / "bootstrap.sh", "setup", env={"TORCH": "none", "PATH": str(tools), "PYTHON": ""})
    assert done.returncode == 2
    assert done.stderr.startswith("membound needs Python 3.11 or newer")
    assert len(done.stderr.splitlines()) == 1


def test_make_names_its_targets(checkout: Path, run: Callable[..., Any]) -> None:
    done = run("make", cwd=checkout)
    assert done.returncode == 0, done.stderr
    for target in ("setup", "dashboard", "test", "lint", "clean"):
        assert f"make {target}" in done.stdout


def test_kernels_are_compiled_before_the_dashboard_starts_and_anew_where_a_source_changed(
    checkout: Path, run: Callable[..., Any], root: Path
) -> None:
    shutil.copytree(root / "kernels" / "cpu", checkout / "kernels" / "cpu")
    (checkout / ".venv").mkdir()
    first = run("make", "-n", "dashboard", cwd=checkout).stdout
    assert first.index("bootstrap.sh setup") < first.index("load_library()") < first.index("membound dashboard")
    (checkout / ".venv" / ".kernels").touch()
    assert "load_library()" not in run("make", "-n", "dashboard", cwd=checkout).stdout
    assert "load_library()" in run("make", "-n", "-W", "kernels/cpu/linear.cpp", "dashboard", cwd=checkout).stdout
