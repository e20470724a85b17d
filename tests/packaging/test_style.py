"""Do the linter, the formatter and the type checker pass over the repository?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_ruff_finds_nothing(root: Path, run: Callable[..., Any]) -> None:
    done = run(sys.executable, "-m", "ruff", "check", "--output-format=concise", ".", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_would_format_nothing(root: Path, run: Callable[..., Any]) -> None:
    done = run(sys.executable, "-m", "ruff", "format", "--check", "--output-format=concise", ".", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing(root: Path, run: Callable[..., Any]) -> None:
    link = root / "build" / "typing" / "membound"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path("..", ".."), target_is_directory=True)
    done = run(sys.executable, "-m", "mypy", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
