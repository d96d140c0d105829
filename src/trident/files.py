"""Files that are there whole or not at all."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError


def check_writable(path: Path) -> None:
    """Before long work starts: whether a file can come to stand there."""
    if not path.parent.is_dir():
        raise TridentError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_file():
        raise TridentError(f"cannot write {path}: it exists and is not an ordinary file")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under `path` whole or not at all, whatever happens in between."""
    path = Path(path)
    check_writable(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not _runs(leftover.name.split(".")[-2]):
            leftover.unlink(missing_ok=True)  # of a process that was killed while it wrote
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name is on disk only once its folder is
        finally:
            os.close(folder)
    except OSError as error:
        raise TridentError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True
