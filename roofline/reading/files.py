"""How are files read and written so that a wrong path is one sentence, and two processes at once lose nothing?"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from membound.roofline.errors import MemboundError


def expanded(given: str | os.PathLike[str], what: str) -> Path:
    """A path with its `~` replaced; raises MemboundError where `what` names the home of a user who is not known."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise MemboundError(
            f"{what} '{given}' begins with the home folder of an unknown user; give the whole path"
        ) from None


def reason(error: Exception) -> str:
    """What the system says of a path that it refused, as part of a sentence."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not UTF-8 text" if isinstance(error, UnicodeError) else "a path cannot hold a NUL character"


def state_of(path: Path, what: str) -> os.stat_result:
    """Size and time of a regular file; raises MemboundError for anything else: a pipe would be waited for forever."""
    try:
        state = path.stat()
    except (OSError, ValueError) as error:
        raise MemboundError(f"{what} {_quoted(path)} cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(state.st_mode):
        kind = "a folder" if stat.S_ISDIR(state.st_mode) else "a pipe or a device"
        raise MemboundError(f"{what} '{path}' cannot be read: it is {kind}, not a regular file")
    return state


def read_bytes(path: Path, what: str) -> bytes:
    """The content of a regular file; raises MemboundError with one sentence."""
    state_of(path, what)
    try:
        return path.read_bytes()
    except OSError as error:
        raise MemboundError(f"{what} '{path}' cannot be read: {reason(error)}") from None


def read_text(path: Path, what: str) -> str:
    """The text of a regular file in UTF-8; raises MemboundError with one sentence."""
    try:
        return read_bytes(path, what).decode("utf-8")
    except UnicodeError as error:
        raise MemboundError(f"{what} '{path}' cannot be read: {reason(error)}") from None


# A scenario is a few kilobytes; what goes on for so long is none.
MOST_PIPED_BYTES = 1 << 24


def is_pipe(path: Path) -> bool:
    """Whether a pipe or the standard input is there, whose writer somebody has named on purpose."""
    try:
        state = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(state.st_mode) or (str(path) == "/dev/stdin" and not stat.S_ISREG(state.st_mode))


def read_pipe(path: Path | None, what: str) -> str:
    """The text that a pipe brings until its end, the standard input where no path is given; raises MemboundError."""
    named = "the standard input" if path is None else f"'{path}'"
    try:
        with open(0 if path is None else path, "rb", closefd=path is not None) as pipe:
            text = pipe.read(MOST_PIPED_BYTES + 1)
    except (OSError, ValueError) as error:
        raise MemboundError(f"{what} from {named} cannot be read: {reason(error)}") from None
    if len(text) > MOST_PIPED_BYTES:
        raise MemboundError(f"{what} from {named} has more than {MOST_PIPED_BYTES:,} bytes; give a file")
    try:
        return text.decode("utf-8")
    except UnicodeError as error:
        raise MemboundError(f"{what} from {named} cannot be read: {reason(error)}") from None


def is_file(path: Path) -> bool:
    """Whether a regular file is there; a path that no system takes is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is there; a path that no system takes is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def move_aside(path: Path, suffix: str) -> Path | None:
    """Moves a file that is about to be replaced to `path.suffix`, numbered where that is taken; None without one."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.{suffix}{number or ''}") for number in (0, *range(2, 10_000)))
    kept = next(name for name in names if not name.exists())
    return path.replace(kept)


def write_files(contents: Mapping[Path, bytes], aside: Mapping[Path, str] | None = None) -> dict[Path, Path]:
    """Writes every file beside its place first and only then moves all there, so that a full disk changes none.

    A file of `aside` that is there already is kept under that suffix; returns where. Raises OSError.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A name of its own for each writer: another process may write the same file at the same time.
            handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".partial", dir=path.parent)
            written[path] = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                file.flush()
                os.fsync(file.fileno())
        kept = {}
        for path, partial in written.items():
            moved = move_aside(path, aside[path]) if aside and path in aside else None
            if moved is not None:
                kept[path] = moved
            partial.replace(path)
        return kept
    finally:
        for partial in written.values():
            partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock file `path`, and holds it meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _quoted(path: Path) -> str:
    """A path in quotes, its unprintable characters escaped."""
    text = str(path)
    return f"'{text}'" if text.isprintable() else repr(text)
