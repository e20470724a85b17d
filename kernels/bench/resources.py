"""What does every kernel of serving take of a multiprocessor? Compiled on all cores, one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from membound.roofline.progress import Progress


def compile_all(arch: str, cases: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    """One row a launch, in the order of `cases`; of one that does not compile its `problem`."""
    found = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for done, (case, rows) in enumerate(
            zip(cases, pool.map(lambda case: _compiled(arch, case), cases), strict=True)
        ):
            progress((done + 1) / len(cases), case)
            found += rows
    return found


def command_of(arch: str, case: str) -> list[str]:
    return [sys.executable, "-m", "membound.kernels.triton.resources", arch, case]


def _compiled(arch: str, case: str) -> list[dict[str, Any]]:
    """In a process of its own: what a kernel was defined for cannot be changed, and compiling holds the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command_of(arch, case), capture_output=True, text=True, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
        return [{"case": case, "problem": f"does not compile for {arch}: {said[-1]}"}]
    return [json.loads(line) for line in done.stdout.splitlines()]
