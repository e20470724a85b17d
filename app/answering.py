"""What does an answer depend on: which version of the code and its data, and which devices this home knows?

An answer that is kept holds for the one who gave it: another one may answer differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from membound.roofline.hardware.devices import user_hardware_folder
from membound.roofline.home import device_fits_path, local_calibration_path

# Where the physics and its facts lie; what the app makes of them says itself which layout it has.
PACKAGES = ("roofline", "simulator", "data")
# Of the documents that answers are kept as; another one makes all questions new.
LAYOUT = 2


def who_answers() -> str:
    """A short hash that changes with the code and its facts, this machine's calibration, the fits of devices and the
    data sheets of the home."""
    home = (local_calibration_path(), device_fits_path("any").parent, user_hardware_folder())
    known = [_SOURCES, *(list(_states(path)) for path in home)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def digest_of(kind: str, spec: Mapping[str, Any]) -> str:
    """A short hash of the question and of who answers."""
    asked = [kind, dict(spec), LAYOUT, who_answers()]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def sources_of(folders: Iterable[Path]) -> str:
    """A short hash of the files in folders, as far as their names, times and sizes tell."""
    listed = [list(_states(folder)) for folder in folders]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def _states(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, time of the last change and size of a file, or of all files of a folder; none of what is not there."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if "__pycache__" in file.parts:
            continue
        try:
            state = file.stat()
        except OSError:
            continue
        if not file.is_dir():
            yield file.relative_to(path).as_posix(), state.st_mtime_ns, state.st_size


# As they were when this process began: that is the code that it runs.
_SOURCES = sources_of(Path(str(resources.files(f"membound.{package}"))) for package in PACKAGES)
