"""Where does membound keep what it learnt: calibrations, runs, weights, compiled kernels?"""

from __future__ import annotations

import os
from pathlib import Path


def home_folder() -> Path:
    """The folder of this user's data: `$MEMBOUND_HOME`, else `~/.local/share/membound`. It need not exist yet."""
    home = Path(os.environ.get("MEMBOUND_HOME") or Path.home() / ".local" / "share" / "membound")
    return home.expanduser().absolute()


def local_calibration_path() -> Path:
    """Where the calibration of this machine lies."""
    return home_folder() / "calibration" / "local.json"
