"""Writing files atomically."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError

LONGEST_NAME = 255  # bytes, on all common file systems


def short_digest(path: Path) -> str:
    """Tells files apart: the beginning of the SHA-256 of the content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def open_regular(path: Path, most_bytes: int) -> BinaryIO:
    """Open a file for reading. What is no regular file (a FIFO, a device, a socket) or is too large is an error."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # does not wait for a FIFO's writer
    except OSError as error:
        raise TridentError(f"cannot read {path}: {error.strerror}") from error
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_size <= most_bytes:
        return file
    file.close()
    kind = f"it has more than {most_bytes} bytes" if stat.S_ISREG(about.st_mode) else "it is not an ordinary file"
    raise TridentError(f"cannot read {path}: {kind}")


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
