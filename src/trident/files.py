"""Reading ordinary files only, up to a stated size, and writing files atomically."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError

LONGEST_NAME = 255  # bytes, on all common file systems
_MOST_DIGESTED = 2**33  # bytes of a file whose digest is wanted; weights have at most half of it


class UnopenedError(TridentError, OSError):
    """A file that cannot be opened, or not safely. `strerror` is the reason."""

    def __str__(self) -> str:
        return f"cannot read {self.filename}: {self.strerror}"


def open_regular(path: Path, most_bytes: int) -> BinaryIO:
    """Open an ordinary file of at most so many bytes. All else is an UnopenedError.

    Devices have no end, and FIFOs let a reader wait forever: they are opened without waiting, and refused.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise UnopenedError(error.errno, error.strerror, str(path)) from error
    about = os.fstat(file.fileno())
    ordinary = stat.S_ISREG(about.st_mode)
    if ordinary and about.st_size <= most_bytes:
        return file
    file.close()
    raise UnopenedError(EINVAL, _too_large(most_bytes) if ordinary else "it is not an ordinary file", str(path))


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a file that `open_regular` opens."""
    with open_regular(path, most_bytes) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grew meanwhile
        raise UnopenedError(EINVAL, _too_large(most_bytes), str(path))
    return content


def _too_large(most_bytes: int) -> str:
    return f"it has more than {most_bytes} bytes, the most that can be read"


def short_digest(path: Path) -> str:
    """Tells files apart: the beginning of the SHA-256 of the content."""
    with open_regular(path, _MOST_DIGESTED) as file:
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
