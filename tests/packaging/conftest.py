from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = ("app", "data", "kernels", "roofline", "runtime", "simulator")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def packages() -> tuple[str, ...]:
    return PACKAGES


@pytest.fixture(scope="session")
def repository_files(root: Path) -> list[Path]:
    """What git tracks or would track, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted(set(filter(None, listed.stdout.split("\0"))))
    return [Path(name) for name in names if (root / name).is_file()]


@pytest.fixture(scope="session")
def run() -> Run:
    def run(
        *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def membound() -> Path:
    """The console script, as an installed user has it."""
    script = Path(sys.executable).parent / "membound"
    assert script.exists(), "membound is not installed in this environment (make test)"
    return script


@pytest.fixture(scope="session")
def least_cpu_s(run: Run) -> Callable[..., float]:
    """CPU seconds of a command, best of three: unlike wall time it does not grow with other load."""

    def measure(*command: str | Path) -> float:
        taken = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = run(*command)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == 0, done.stderr
            taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(taken)

    return measure
