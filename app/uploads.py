"""Where is a file kept that somebody uploaded, so that a worker and a link find it again, and for how long?

Its name is the digest of its content, so that nothing of the name that the browser sent becomes a path. It stays while
a kept run or an active job names it, and for some time after it was last asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from membound.app.home import StoreError, storage_error
from membound.app.store import Store
from membound.roofline.errors import MemboundError

MOST_MB = 20
# Days since an upload was last asked for, after which it goes unless something names it.
MOST_DAYS = 30.0
_DAY_S = 86400.0
_DIGEST = re.compile(r"[0-9a-f]{16}")
_NAMED = re.compile(r"uploads/([0-9a-f]{16})")


def keep(store: Store, content: bytes) -> str:
    """Writes the content, unless it is there, and returns its digest; raises MemboundError where it is too large."""
    if len(content) > MOST_MB * 2**20:
        raise MemboundError(f"the file has {len(content) / 2**20:.1f} MiB; at most {MOST_MB} MiB can be uploaded")
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = _folder(store) / digest
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            draft = path.with_suffix(".draft")
            draft.write_bytes(content)
            draft.replace(path)
        else:
            path.touch()
    except OSError as error:
        raise storage_error(error, path) from error
    remove_unused(store)
    return digest


def find(store: Store, digest: str) -> Path:
    """The file of that digest; raises MemboundError where there is none."""
    path = _folder(store) / digest
    if not _DIGEST.fullmatch(digest) or not path.is_file():
        raise MemboundError(f"the uploaded file {digest[:40]!r} is not on this machine; upload it again")
    with suppress(OSError):  # a disk that cannot be written to does not hide a file
        os.utime(path)
    return path


def remove_unused(store: Store) -> list[str]:
    """Deletes the uploads that nobody asked for in `MOST_DAYS` days and that no kept run and no active job names.

    Returns their names. Several processes may do so at once.
    """
    old = {path.name: path for path in _older_than(_folder(store), MOST_DAYS)}
    if not old:  # what is kept need not be read
        return []
    for digest in _named_digests(store):
        old.pop(digest, None)
    for path in old.values():
        with suppress(OSError):  # another process was faster
            path.unlink()
    return sorted(old)


def _older_than(folder: Path, days: float) -> Iterator[Path]:
    before = time.time() - days * _DAY_S
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    yield path


def _named_digests(store: Store) -> Iterator[str]:
    """The uploads that kept runs and active jobs name: tables by their digests, traces by their paths."""
    for run in store.runs():
        yield run.label
        with suppress(StoreError):  # deleted meanwhile
            yield from _NAMED.findall(run.scenario_yaml())
    for job in store.jobs(active=True):
        yield str(job.spec.get("table", ""))
        yield from _NAMED.findall(str(job.spec.get("scenario", "")))


def renamed(error: MemboundError) -> MemboundError:
    """The error without the path under which an upload is kept, which nobody who uploaded it knows."""
    return MemboundError(re.sub(r"(table|trace) '[^']*/uploads/[0-9a-f]{16}'", r"the uploaded \1", str(error)))


def _folder(store: Store) -> Path:
    return store.home / "uploads"
