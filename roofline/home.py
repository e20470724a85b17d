"""Where does membound keep what it learnt: calibrations, runs, weights, compiled kernels?"""

from __future__ import annotations

import os
import re
from pathlib import Path


def home_folder() -> Path:
    """The folder of this user's data: `$MEMBOUND_HOME`, else `~/.local/share/membound`. It need not exist yet."""
    home = Path(os.environ.get("MEMBOUND_HOME") or Path.home() / ".local" / "share" / "membound")
    return home.expanduser().absolute()


def local_calibration_path() -> Path:
    """Where the calibration of this machine lies."""
    return home_folder() / "calibration" / "local.json"


def file_stem(name: str) -> str:
    """A name without what a file's name cannot hold everywhere."""
    return re.sub(r"[^A-Za-z0-9.+-]", "_", name)


def device_fits_path(device: str) -> Path:
    """Where the kernels lie that a table of measurements showed of a device."""
    return home_folder() / "calibration" / "devices" / f"{file_stem(device)}.json"


def keep_previous(path: Path) -> Path | None:
    """Moves a file that is about to be replaced aside, under a name that is free; None where there is none."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.previous{number or ''}") for number in (0, *range(2, 10_000)))
    kept = next(name for name in names if not name.exists())
    return path.replace(kept)
