"""Writing files atomically."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError


def check_writable(path: Path) -> None:
    """Check, before long work starts, that the file can be written."""
    if not path.parent.is_dir():
        raise TridentError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise TridentError(f"cannot write {path}: it exists and is not an ordinary file")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing. It appears at `path` only when it is complete."""
    path = Path(path)
    check_writable(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not _runs(leftover.name.split(".")[-2]):
            leftover.unlink(missing_ok=True)  # from a process that was killed while writing
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
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


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True
