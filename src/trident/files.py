"""Reads ordinary files only, and writes files so that nobody sees half of one, also in folders that machines share.

Until it is complete, a file has a temporary name, and its writer holds a lock on it, which ends with the process. What
has no lock is left over, and deleted by the next process that writes beside it. Not all file systems show locks to
other machines, so what this machine has not written since its start must also be a day old.
"""

import fcntl
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError, os_errors

LONGEST_NAME = 255  # bytes, on all common file systems
_TEMPORARY = re.compile(r"\.trident-([0-9a-f]{8})-[0-9a-f]{16}\.(part|link)")
_DAY = 24 * 60 * 60  # seconds
MOST_TEXT = 2**28  # bytes of lists, logs, results and the like
MOST_DATA = 2**50  # bytes of stores and archives, of which only parts are in memory
MOST_WEIGHTS = 2**32  # bytes: enough for the largest network that is allowed and Adam's two moments


class UnopenedError(TridentError, OSError):
    """A file that cannot be opened, or not safely. `strerror` is the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"cannot read {path}: {reason}")
        self.strerror = reason


def open_regular(path: Path, most_bytes: int = MOST_TEXT) -> BufferedReader:
    """Open an ordinary file of at most so many bytes. All else is an UnopenedError.

    Devices have no end, and FIFOs let a reader wait forever: they are opened without waiting, and refused.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise UnopenedError(path, str(error.strerror)) from error
    about = os.fstat(file.fileno())
    regular = stat.S_ISREG(about.st_mode)
    if regular and about.st_size <= most_bytes:
        return file
    file.close()
    raise UnopenedError(path, _too_large(most_bytes) if regular else "it is not an ordinary file")


def read_regular(path: Path, most_bytes: int = MOST_TEXT) -> bytes:
    """The content of a file that `open_regular` opens."""
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grew meanwhile
        raise UnopenedError(path, _too_large(most_bytes))
    return content


def _too_large(most_bytes: int) -> str:
    return f"it has more than {most_bytes} bytes, the most that can be read"


def short_digest(path: Path) -> str:
    """Tells files apart: the beginning of the SHA-256 of the content."""
    with open_regular(path, MOST_WEIGHTS) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def check_writable(path: Path) -> None:
    """Check, before long work starts, that the file can be written."""
    if not path.parent.is_dir():
        raise TridentError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise TridentError(f"cannot write {path}: it exists and is not an ordinary file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise TridentError(f"cannot write {path}: Permission denied")


def check_new(path: Path) -> None:
    """Check that a new file can be written, and replaces no other."""
    check_writable(path)
    if path.exists():
        raise TridentError(f"{path} exists already: choose another name, or delete it first")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears at `path` only when it is complete."""
    path = Path(path)
    check_writable(path)
    for leftover in path.parent.glob(".trident-*"):
        delete_leftover(leftover)
    with os_errors(f"cannot write {path}"), temporary_file(path.parent) as (temporary, file):
        yield file
        file.flush()
        os.fsync(file.fileno())
        replace_file(temporary, path)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8. It appears only when it is complete."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def replace_file(complete: Path, path: Path) -> None:
    complete.replace(path)
    flush(path.parent)


def flush(*paths: Path) -> None:
    """Wait until files, or the names in folders, are on disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file, which is deleted at the end unless it has another name by then."""
    while True:
        path = temporary_path(folder)
        file = path.open("xb")
        if locked(file) is not False and path.exists():
            break
        file.close()  # before the lock was taken, another process found it without, and deletes it
    try:
        yield path, file
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # on a full disk, what is still to be written
            file.close()


def temporary_path(folder: Path, kind: str = "part") -> Path:
    return folder / f".trident-{_this_machine()}-{secrets.token_hex(8)}.{kind}"


def delete_leftover(path: Path) -> None:
    """Delete a temporary file if the process that wrote it has ended, and no half-done move needs it.

    A move needs its temporary name while the file has other names, old or new ones. After a day it is given up.
    """
    name = _TEMPORARY.fullmatch(path.name)
    if not name or not path.is_file():
        return
    with suppress(OSError), path.open("rb") as file:
        about = os.fstat(file.fileno())
        link = name[2] == "link"  # a further name of a file that is moved, which has an old and a new one, too
        free = link or locked(file, fcntl.LOCK_SH)
        unneeded = about.st_nlink <= 2 if link else free and name[1] == _this_machine() and about.st_nlink == 1
        if free is not False and (unneeded or time.time() - about.st_ctime > _DAY):
            path.unlink()


def locked(file: BinaryIO, how: int = fcntl.LOCK_EX) -> bool | None:
    """Take a lock on a file if no other process has one; None if the file system has no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@cache
def _this_machine() -> str:
    """An id of this machine since its last start. Containers of one machine share it, and see each other's locks."""
    start = Path("/proc/sys/kernel/random/boot_id")
    known = start.read_text() if start.exists() else socket.gethostname()
    return hashlib.sha256(known.encode()).hexdigest()[:8]
