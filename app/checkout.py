"""Which version of membound's source does this process run? A later reader of a run asks that first."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 5.0
# What the name of a commit ends with where files differ from it.
DIRTY = "-dirty"


@cache
def commit() -> str | None:
    """The commit that is checked out, with `-dirty` where files differ from it; None where this is no checkout."""
    if not (ROOT / ".git").exists():  # an installed package may lie in somebody else's repository
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", f"--dirty={DIRTY}", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
