"""Reading ordinary files only, up to a stated size, and writing files atomically."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError

LONGEST_NAME = 255  # bytes, on all common file systems
MOST_TEXT = 2**28  # bytes of lists, logs, results and the like
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
    if stat.S_ISREG(about.st_mode) and about.st_size <= most_bytes:
        return file
    file.close()
    raise UnopenedError(path, _large(most_bytes) if stat.S_ISREG(about.st_mode) else "it is not an ordinary file")


def read_regular(path: Path, most_bytes: int = MOST_TEXT) -> bytes:
    """The content of a file that `open_regular` opens."""
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grew meanwhile
        raise UnopenedError(path, _large(most_bytes))
    return content


def _large(most_bytes: int) -> str:
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
    """The same for a file that must not replace another."""
    check_writable(path)
    if path.exists():
        raise TridentError(f"{path} exists already: choose another name, or delete it first")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears at `path` only when it is complete."""
    path = Path(path)
    check_writable(path)
    name = _short(path.name)
    for leftover in path.parent.glob(f".{glob.escape(name)}.*.part"):
        if not process_runs(leftover.name.split(".")[-2]):
            leftover.unlink(missing_ok=True)  # from a process that was killed while writing
    temporary = path.with_name(f".{name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except OSError as error:
        raise TridentError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(complete: Path, path: Path) -> None:
    """Give a complete file its final name."""
    complete.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on disk only after this
    finally:
        os.close(folder)


def _short(name: str) -> str:
    """The name, or a digest of it if a temporary name made from it would be too long for the file system."""
    content = os.fsencode(name)
    return name if len(content) <= LONGEST_NAME - 32 else hashlib.sha256(content).hexdigest()[:32]


def process_runs(process: str) -> bool:
    """Whether a process of this number runs on this machine. True if that cannot be known."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True
