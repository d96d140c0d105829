"""Writes a store that takes long to make, so that it can be resumed after a kill.

The store grows in a hidden `.part` file beside the target. A journal says what it is made from, and every few seconds
how many images are safely on disk, with a digest of them. A second run with the same inputs compares these and goes on
after them. The result has the same bytes as without the kill.
"""

import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from trident.data.store import StoreWriter
from trident.errors import ResumableError, TridentError, os_errors
from trident.files import check_new, check_writable, locked, replace_file

SAVE_SECONDS = 2.0  # a kill loses at most this much work

NewWriter = Callable[[BinaryIO], StoreWriter]
ImagesFrom = Callable[[int], Generator[np.ndarray, None, None]]  # all images but the first ones, as many as given


class Saved(NamedTuple):
    images: int  # so many are on disk
    digest: str  # `StoreWriter.running_digest` after them


def write_resumable_store(
    path: Path,
    new_writer: NewWriter,
    inputs: str,
    images_from: ImagesFrom,
    on_resume: Callable[[int, int], None] | None = None,
) -> None:
    """Write a store file, or go on with one of the same `inputs` that was killed or interrupted.

    `on_resume(n, total)` is called if n images were there already. An error leaves nothing behind. Ctrl-C and a
    `ResumableError` leave what is needed to go on.
    """
    check_writable(path)
    part, journal_path = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.journal")
    with os_errors(f"cannot write {path}"), journal_path.open("a+b") as journal:
        if locked(journal) is False:
            raise TridentError(f"another process is writing {path}: wait for it, or choose another file")
        try:
            check_new(path)  # under the lock: another process may just have written it
            saved = _read_journal(journal, inputs)
            with part.open("r+b" if saved and part.is_file() else "w+b") as file:
                writer = _taken_over(file, new_writer, saved)
                check_space(file, path, writer.size)
                if writer.written and on_resume:
                    on_resume(writer.written, writer.total)
                _write(writer, journal, inputs, images_from)
            replace_file(part, path)
        except ResumableError as error:
            raise ResumableError(f"{error}; the same command goes on where it stopped") from error
        except Exception:
            part.unlink(missing_ok=True)
            journal_path.unlink(missing_ok=True)
            raise
        journal_path.unlink(missing_ok=True)


def check_new_store(path: Path) -> None:
    """Check that there is no such store yet. If it was killed at its very end, its journal is left, and deleted now."""
    if path.exists() and not path.with_name(f".{path.name}.part").exists():
        path.with_name(f".{path.name}.journal").unlink(missing_ok=True)
    check_new(path)


def _write(writer: StoreWriter, journal: BinaryIO, inputs: str, images_from: ImagesFrom) -> None:
    def save() -> None:
        _flush(writer.file)
        _append(journal, Saved(writer.written, writer.running_digest)._asdict())

    journal.truncate(0)  # it may have entries for images that are not intact
    _append(journal, {"inputs": inputs})
    save()
    last = time.monotonic()
    with closing(images_from(writer.written)) as images:
        try:
            for image in images:
                writer.add(image)
                if time.monotonic() - last >= SAVE_SECONDS:
                    save()
                    last = time.monotonic()
        except (KeyboardInterrupt, ResumableError):
            save()
            raise
    writer.finish()
    _flush(writer.file)


def _read_journal(journal: BinaryIO, inputs: str) -> list[Saved]:
    """What a run with the same inputs has saved. The last line may be incomplete."""
    journal.seek(0)
    saved: list[Saved] = []
    with suppress(ValueError, TypeError):
        if json.loads(journal.readline()) == {"inputs": inputs}:
            for line in journal:
                saved.append(Saved(**json.loads(line)))
    return saved


def _append(journal: BinaryIO, entry: dict[str, object]) -> None:
    journal.write(json.dumps(entry).encode() + b"\n")
    _flush(journal)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _taken_over(file: BinaryIO, new_writer: NewWriter, saved: list[Saved]) -> StoreWriter:
    """A writer that stands after the images that are in the file as the journal says."""
    writer, intact = new_writer(file), 0
    for entry in saved:
        if not writer.take_over(entry.images) or writer.running_digest != entry.digest:
            break
        intact = writer.written
    if writer.written != intact:  # after a power failure the file may have less than the journal says
        writer = new_writer(file)
        writer.take_over(intact)
    writer.cut()
    return writer


def check_space(file: BinaryIO, name: object, n_bytes: int) -> None:
    """Check that the file can grow to this size."""
    free = os.fstatvfs(file.fileno())
    have = free.f_bavail * free.f_frsize + os.fstat(file.fileno()).st_size
    if have < n_bytes:
        raise TridentError(f"cannot write {name}: it needs {n_bytes / 1e6:.1f} MB, and {have / 1e6:.1f} MB are free")
