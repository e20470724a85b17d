"""What does every kernel of serving take of a multiprocessor? Compiled on all cores, one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_all(arch: str, cases: Sequence[str], progress: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """One row a launch, in the order of `cases`."""
    found = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for done, (case, rows) in enumerate(
            zip(cases, pool.map(lambda case: _compiled(arch, case), cases), strict=True)
        ):
            progress((done + 1) / len(cases), case)
            found += rows
    return found


def _compiled(arch: str, case: str) -> list[dict[str, Any]]:
    """In a process of its own: what a kernel was defined for cannot be changed, and compiling holds the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "membound.kernels.triton.resources", arch, case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{case} does not compile for {arch}: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
