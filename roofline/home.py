"""Where does membound keep its files: calibrations, runs, weights, compiled kernels?"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from urllib.parse import quote

from membound.roofline.errors import MemboundError
from membound.roofline.reading.files import expanded

# A file's name holds 255 bytes; this leaves room for suffixes.
_LONGEST_STEM_BYTES = 160


def home_folder() -> Path:
    """The folder of this user's data: `$MEMBOUND_HOME`, else `~/.local/share/membound`. It need not exist yet.

    Raises MemboundError for a path at which no folder can be.
    """
    given = os.environ.get("MEMBOUND_HOME")
    home = expanded(given or "~/.local/share/membound", "MEMBOUND_HOME" if given else "the home of membound").absolute()
    try:
        home.stat()
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise MemboundError(
                f"MEMBOUND_HOME is '{home}', which cannot be a folder: {error.strerror}; set it to a folder of your own"
            ) from None
    return home


def local_calibration_path() -> Path:
    """Where the calibration of this machine lies."""
    return home_folder() / "calibration" / "local.json"


def file_stem(name: str) -> str:
    """A name as a file can have it: letters and digits of any script stay, all else but `.+-_` is percent-encoded.

    Different names have different stems; of a very long one the end is replaced by a digest.
    """
    stem = "".join(char if char.isalnum() else quote(char, safe="+") for char in name)
    if len(stem.encode()) <= _LONGEST_STEM_BYTES:
        return stem
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{stem.encode()[:100].decode(errors='ignore')}%{digest}"


def calibration_lock_path() -> Path:
    """What a process holds that changes the fits of devices or the user's devices."""
    return home_folder() / "calibration" / ".devices.lock"


def device_fits_path(device: str) -> Path:
    """Where the kernels lie that a table of measurements showed of a device."""
    return home_folder() / "calibration" / "devices" / f"{file_stem(device)}.json"
