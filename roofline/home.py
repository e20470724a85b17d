"""Where does membound keep what it learnt: calibrations, runs, weights, compiled kernels?"""

from __future__ import annotations

import os
from pathlib import Path


def membound_home() -> Path:
    """The folder of this user's data: `$MEMBOUND_HOME`, else `~/.local/share/membound`. It need not exist yet."""
    return Path(os.environ.get("MEMBOUND_HOME") or Path.home() / ".local" / "share" / "membound")


def local_calibration_path() -> Path:
    """Where the calibration of this machine lies."""
    return membound_home() / "calibration" / "local.json"
