"""Where is a file kept that somebody uploaded, so that a worker and a link find it again?

Its name is the digest of its content, so that nothing of the name that the browser sent becomes a path.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from membound.app.home import storage_error
from membound.app.store import Store
from membound.roofline.errors import MemboundError

MOST_MB = 20
_DIGEST = re.compile(r"[0-9a-f]{16}")


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
    except OSError as error:
        raise storage_error(error, path) from error
    return digest


def find(store: Store, digest: str) -> Path:
    """The file of that digest; raises MemboundError where there is none."""
    path = _folder(store) / digest
    if not _DIGEST.fullmatch(digest) or not path.is_file():
        raise MemboundError(f"the uploaded file {digest[:40]!r} is not on this machine; upload it again")
    return path


def renamed(error: MemboundError) -> MemboundError:
    """The error without the path under which an upload is kept, which nobody who uploaded it knows."""
    return MemboundError(re.sub(r"(table|trace) '[^']*/uploads/[0-9a-f]{16}'", r"the uploaded \1", str(error)))


def _folder(store: Store) -> Path:
    return store.home / "uploads"
