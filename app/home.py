"""Where does membound keep its files, how is their index opened, and what is said when that fails?"""

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from membound.roofline.errors import MemboundError
from membound.roofline.home import home_folder

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL, spec TEXT NOT NULL, owner TEXT NOT NULL,
    progress REAL NOT NULL DEFAULT 0, message TEXT NOT NULL DEFAULT '', error TEXT, result TEXT,
    created REAL NOT NULL, started REAL, finished REAL, pid INTEGER, pid_born TEXT, cancel_requested REAL);
CREATE INDEX IF NOT EXISTS job_by_state ON job (state, created);
CREATE TABLE IF NOT EXISTS event (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, t REAL NOT NULL, kind TEXT NOT NULL,
    payload TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS event_by_job ON event (job_id, seq);
CREATE TABLE IF NOT EXISTS run (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, label TEXT NOT NULL, digest TEXT NOT NULL, created REAL NOT NULL,
    job_id TEXT, summary TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS run_by_created ON run (created);
"""
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
_ALMOST_FULL_BYTES = 256 * 1024


class StoreError(MemboundError):
    """The store cannot do what was asked: one sentence with the path and what to do about it."""


def membound_home() -> Path:
    """Return the folder of runs and jobs, made if missing.

    Raises:
        StoreError: the folder cannot be made or written to.
    """
    home = home_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, home) from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise _not_writable(home)
    return home


class Index:
    """The SQLite file that several processes read and write: a connection per call, made with its tables if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Give a connection whose changes are all kept, or none of them if the block raises."""
        with self._explained(), closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give a connection to read from; it also works on a full or read-only disk."""
        with self._explained():
            try:
                connection = self._connect()
            except sqlite3.OperationalError:
                connection = self._connect_without_writing()
            with closing(connection):
                yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise storage_error(error, self.path) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._create_tables(connection)
            self._check_version(version)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_without_writing(self) -> sqlite3.Connection:
        """Open the file as it stands; what other processes have not yet folded in from their log is not seen."""
        connection = sqlite3.connect(f"file:{quote(str(self.path))}?immutable=1", uri=True, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            self._check_version(connection.execute("PRAGMA user_version").fetchone()[0])
        except BaseException:
            connection.close()
            raise
        return connection

    def _create_tables(self, connection: sqlite3.Connection) -> None:
        _enable_write_ahead_log(connection)
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def _check_version(self, version: int) -> None:
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer membound (schema {version}, this one reads {SCHEMA_VERSION}): "
                "update membound, or set MEMBOUND_HOME to another folder."
            )


def _enable_write_ahead_log(connection: sqlite3.Connection) -> None:
    # SQLite answers "locked" at once, without its usual patience, while another process makes the same switch.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def storage_error(error: sqlite3.Error | OSError, path: Path) -> StoreError:
    """Say in one sentence what an error of the disk or of SQLite at `path` means and what to do."""
    if _is_full(error, path):
        return StoreError(
            f"The disk that holds {path} is full: free some space and try again; earlier runs are intact."
        )
    if isinstance(error, sqlite3.Error):
        return _sqlite_error(error, path)
    if error.errno in _NOT_WRITABLE_ERRNOS:
        return _not_writable(path)
    return StoreError(f"Cannot use {path} ({error.strerror or error}): check the disk, or set MEMBOUND_HOME elsewhere.")


def _sqlite_error(error: sqlite3.Error, path: Path) -> StoreError:
    primary_code = _primary_code(error)
    if primary_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError(
            f"The index {path} is damaged: move that file away and start again, "
            f"and membound rebuilds it from the run folders in {path.parent / 'runs'}."
        )
    if primary_code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return _not_writable(path)
    if primary_code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"The index {path} is held by another process: try again in a few seconds.")
    return StoreError(f"Cannot use the index {path} ({error}): check the disk, or set MEMBOUND_HOME to another folder.")


def _is_full(error: sqlite3.Error | OSError, path: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    primary_code = _primary_code(error)
    if primary_code == sqlite3.SQLITE_FULL:
        return True
    # SQLite reports a full disk as an I/O error when it cannot grow the file it shares between processes.
    if primary_code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        try:
            return shutil.disk_usage(path.parent).free < _ALMOST_FULL_BYTES
        except OSError:
            return False
    return False


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _not_writable(path: Path) -> StoreError:
    return StoreError(f"Cannot write to {path}: give it write permission, or set MEMBOUND_HOME to another folder.")
