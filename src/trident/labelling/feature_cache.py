"""Features that were computed before, in one SQLite file, by the backbone and the content of the picture.

Each call opens the file anew. So a cache can be pickled, several threads and processes can use it at once, and a
process that is killed loses only its unfinished call. The cache only saves time: if it cannot be used, `problem` says
why, and it finds nothing and stores nothing. A damaged file is set aside, and a new one is made.
"""

import errno
import fcntl
import os
import sqlite3
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import numpy as np

from trident.errors import TridentError

DEFAULT_LIMIT = 2 * 2**30  # bytes
_FILE = "features.sqlite"
_VERSION = 1  # of the tables below
_WAIT = 20.0  # seconds to wait for another process that is writing
_KEYS_AT_ONCE = 500  # in one query; old versions of SQLite take up to 999 values

# Features have a table of their own, so that a new time of last use does not write them again.
# The default rollback journal is kept, because a write-ahead log is not safe on network disks, where homes often are.
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS pictures (
    id INTEGER PRIMARY KEY,
    backbone TEXT NOT NULL,
    picture BLOB NOT NULL,
    used INTEGER NOT NULL,
    size INTEGER NOT NULL,
    UNIQUE (backbone, picture)
);
CREATE INDEX IF NOT EXISTS by_use ON pictures (used, size);
CREATE TABLE IF NOT EXISTS features (id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, content BLOB NOT NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
# Errors that come from outside the file: the disk, permissions, other processes. All others mean that it is damaged,
# also that it is read-only, if it may be written.
_FROM_OUTSIDE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
}  # fmt: skip

Result = TypeVar("Result")


def cache_folder() -> Path:
    """$TRIDENT_CACHE, else $XDG_CACHE_HOME/trident, else ~/.cache/trident."""
    if chosen := os.environ.get("TRIDENT_CACHE"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "trident"
    try:
        return Path.home() / ".cache" / "trident"
    except RuntimeError as error:
        raise TridentError("there is no home folder for the feature cache: set TRIDENT_CACHE to a folder") from error


class FeatureCache:
    """Features of pictures on disk, up to `limit` bytes. Those that were not used for longest are deleted first.

    `say` gets a line when a damaged file is set aside.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT, say: Callable[[str], object] = warnings.warn):
        self.path = Path(folder) / _FILE
        self._set_aside = self.path.with_name(f"{_FILE}.damaged")
        self.limit = limit
        self.problem: str | None = None  # one line that says why the cache is not used
        self._say = say
        self._run(lambda database: None, None)  # finds a problem now, before any work

    def get(self, fingerprint: str, keys: Sequence[bytes], n_features: int) -> dict[bytes, np.ndarray]:
        """The features (n_features,) float32 of those pictures that are in the cache."""
        rows: dict[bytes, np.ndarray] = {}
        used: dict[bytes, int] = {}

        def look_up(database: sqlite3.Connection) -> None:
            for number, key, checksum, content in _rows(database, fingerprint, keys):
                if _checksum(fingerprint, key, content) == checksum and len(content) == 4 * n_features:
                    rows[key] = np.frombuffer(content, "<f4").astype(np.float32)
                    used[key] = number

        self._run(look_up, None)
        if used:
            self._run(lambda database: _mark_used(database, used.values()), None)
        return rows

    def put(self, fingerprint: str, rows: Mapping[bytes, np.ndarray]) -> None:
        """Store features. They are on disk when this returns. Features that are not finite are not stored."""
        contents = {key: np.asarray(row, "<f4").tobytes() for key, row in rows.items() if np.isfinite(row).all()}
        if contents:
            self._run(lambda database: _store(database, fingerprint, contents, self.limit), None)

    def size(self) -> tuple[int, int]:
        """The number of pictures, and the bytes of their features."""
        return self._run(_size, (0, 0))

    def clear(self) -> None:
        """Delete all features, also those in a file that was set aside."""
        self.problem = None
        self._run(_delete_all, None)
        self._run(lambda database: self._set_aside.unlink(missing_ok=True), None)

    def _run(self, work: Callable[[sqlite3.Connection], Result], otherwise: Result) -> Result:
        """What `work` returns, or `otherwise` if there is a problem. An unfinished transaction is undone."""
        for last in (False, True):
            if self.problem is not None:
                break
            before = None
            try:
                before = self.path.stat() if self.path.exists() else None
                with closing(_connect(self.path)) as database:
                    return work(database)
            except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
                reason = " ".join(str(error).split())
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                places = (place for place in (self.path, self.path.parent) if place.exists())
                writable = all(os.access(place, os.W_OK) for place in places)
                if last or before is None or code in _FROM_OUTSIDE or not writable:
                    self._not_usable(reason)
                else:
                    self._replace(before, reason)
            except OSError as error:
                self._not_usable(error.strerror or str(error))
        return otherwise

    def _replace(self, damaged: os.stat_result, reason: str) -> None:
        """Set the damaged file aside, unless another process has done so already. One of them is kept."""
        try:
            if os.path.samestat(self.path.stat(), damaged):
                for suffix in ("-journal", "-wal", "-shm"):  # they would be applied to the new file
                    self.path.with_name(_FILE + suffix).unlink(missing_ok=True)
                self.path.replace(self._set_aside)
                self._say(f"the feature cache {self.path} was damaged ({reason}): it is now {self._set_aside.name}")
        except OSError as error:
            self._not_usable(error.strerror or str(error))

    def _not_usable(self, reason: str) -> None:
        self.problem = f"the feature cache {self.path} cannot be used ({reason}): features are not stored"


@cache
def _check_locks(folder: Path) -> None:
    """SQLite takes a file system without locks for one whose lock another process has, and waits in vain."""
    try:
        with TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_locks(path.parent)
    database = sqlite3.connect(path, timeout=_WAIT, isolation_level=None)
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)  # features tell something about private pictures
        database.execute("PRAGMA synchronous = NORMAL")
        ((version,),) = database.execute("PRAGMA user_version")
        if version == 0:
            database.executescript(_TABLES)
        elif version != _VERSION:
            raise OSError(f"its version is {version}, not {_VERSION}: delete it if you use no other trident")
        for (statement,) in database.execute("SELECT sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*'"):
            if statement not in _TABLES.replace(" IF NOT EXISTS", ""):
                raise sqlite3.DatabaseError("it has other tables")
    except BaseException:
        database.close()
        raise
    return database


def _rows(
    database: sqlite3.Connection,
    fingerprint: str,
    keys: Iterable[bytes],
    columns: str = "id, picture, checksum, content",
) -> Iterator[tuple]:
    distinct = list(dict.fromkeys(keys))
    for start in range(0, len(distinct), _KEYS_AT_ONCE):
        part = distinct[start : start + _KEYS_AT_ONCE]
        places = ", ".join("?" * len(part))
        yield from database.execute(
            f"SELECT {columns} FROM pictures JOIN features USING (id) WHERE backbone = ? AND picture IN ({places})",
            (fingerprint, *part),
        )


def _checksum(fingerprint: str, key: bytes, content: bytes) -> int:
    """Over all of a row, since a damaged index may lead from one picture to the features of another."""
    return zlib.crc32(content, zlib.crc32(fingerprint.encode() + key))


def _mark_used(database: sqlite3.Connection, numbers: Iterable[int]) -> None:
    now = time.time_ns()
    database.execute("BEGIN IMMEDIATE")
    database.executemany("UPDATE pictures SET used = ? WHERE id = ?", ((now, number) for number in numbers))
    database.execute("COMMIT")


def _store(database: sqlite3.Connection, fingerprint: str, contents: Mapping[bytes, bytes], limit: int) -> None:
    now = time.time_ns()
    database.execute("BEGIN IMMEDIATE")  # waits for other writers here, and not in the middle
    _delete(database, [number for (number,) in _rows(database, fingerprint, contents, "id")])
    for key, content in contents.items():
        number = database.execute(
            "INSERT INTO pictures (backbone, picture, used, size) VALUES (?, ?, ?, ?)",
            (fingerprint, key, now, len(content)),
        ).lastrowid
        checksum = _checksum(fingerprint, key, content)
        database.execute("INSERT INTO features VALUES (?, ?, ?)", (number, checksum, content))
    surplus = _size(database)[1] - limit
    if surplus > 0:
        _delete(database, _oldest(database, surplus))
    database.execute("COMMIT")


def _oldest(database: sqlite3.Connection, surplus: int) -> list[int]:
    """The pictures used least recently, as many as have `surplus` bytes together."""
    numbers = []
    for number, size in database.execute("SELECT id, size FROM pictures ORDER BY used, size, id"):
        if surplus <= 0:
            break
        numbers.append(number)
        surplus -= size
    return numbers


def _delete(database: sqlite3.Connection, numbers: Sequence[int]) -> None:
    for table in ("pictures", "features"):
        database.executemany(f"DELETE FROM {table} WHERE id = ?", [(number,) for number in numbers])


def _delete_all(database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.execute("DELETE FROM pictures")
    database.execute("DELETE FROM features")
    database.execute("COMMIT")
    database.execute("VACUUM")  # the file shrinks, and the deleted features cannot be recovered from it


def _size(database: sqlite3.Connection) -> tuple[int, int]:
    ((pictures, size),) = database.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM pictures")
    return pictures, size
