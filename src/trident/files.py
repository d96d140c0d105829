"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trident.errors import TridentError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under `path` whole or not at all, whatever happens in between."""
    path = Path(path)
    if not path.parent.is_dir():
        raise TridentError(f"cannot write {path}: the folder {path.parent} does not exist")
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
        temporary.unlink(missing_ok=True)
