"""Sorts files into class folders. Never overwrites a file, and never loses one.

A file that is moved within a file system gets its new name before it loses the old one. A file that is copied, or moved
to another file system, is written under a temporary name, and gets its final name when it is complete. A move may be
killed when both files are there. The next run recognises this and deletes the old one, whatever its label is then:
either both names belong to the same inode, or the new file still has its temporary name beside the final one.
"""

import errno
import filecmp
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from trident.errors import TridentError
from trident.files import LONGEST_NAME, process_runs
from trident.progress import Progress

Step = tuple[Path, Path]  # from, to
Inode = tuple[int, int]  # device, number

_TEMPORARY = re.compile(r"\.trident-([0-9]+)-[0-9a-f]{16}\.part")
_NUMBER = re.compile(r"-[0-9]{1,9}(?=(\.[^.]*)?$)")  # at the end of a name, before .png
# What a file system says that gives no second names, or not to this file.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class Sorted(NamedTuple):
    """What was done."""

    done: int  # files
    failures: list[str]  # one line for each file that stayed where it was


def plan(labels: dict[Path, str], target: Path, moving: bool) -> list[Step]:
    """Where each labelled file goes: target/label/name, or name-2 and so on if the name is taken.

    Files that are already in place, or already copied there, are skipped.
    """
    if target.exists() and not target.is_dir():
        raise TridentError(f"{target} is a file: give a folder for the pictures")
    check_folder_names(labels.values(), target)
    begun = _Begun(target) if moving else None
    taken: set[Path] = set()
    steps = []
    for source, label in labels.items():
        if begun and (half_moved := begun.place_of(source)):
            steps.append((source, half_moved))
            continue
        folder = target / label
        if _same(source, folder / source.name):
            continue
        places = (folder / _numbered(source, n) for n in count(1))
        free = (place for place in places if place not in taken)
        # A copy that is there already has the first name with its content, or is still to be made.
        place = next(place for place in free if not os.path.lexists(place) or (not moving and _copied(source, place)))
        taken.add(place)
        if not os.path.lexists(place):
            steps.append((source, place))
    return steps


def check_folder_names(labels: Iterable[str], target: Path) -> None:
    for label in labels:
        if label in ("", ".", "..") or "/" in label or "\0" in label or len(os.fsencode(label)) > LONGEST_NAME:
            raise TridentError(f"class {label!r} cannot be the name of a folder in {target}")


def copies_elsewhere(labels: dict[Path, str], target: Path) -> list[Path]:
    """Copies of these files in folders of other classes than their label: from before the label was corrected."""
    there: dict[str, list[Path]] = {}
    for entry, _ in _files(target):
        for name in {entry.name, _NUMBER.sub("", entry.name)}:
            there.setdefault(name, []).append(Path(entry.path))
    return [
        place
        for source, label in labels.items()
        for place in there.get(source.name, [])
        if place.parent.name != label and _is_numbered(place, source) and _copied(source, place)
    ]


def carry_out(steps: list[Step], target: Path, moving: bool, progress: Progress | None = None) -> Sorted:
    """Copy or move each file, completely or not at all. Never overwrites a file. A failure does not stop the others.

    Temporary files of killed processes are deleted at the end, when the moves that they belong to are finished.
    """
    begun = _Begun(target)
    failures = []
    for number, (source, place) in enumerate(steps, 1):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if moving and begun.place_of(source) == place:
                source.unlink()
            elif moving and _linked(source, place):
                _delete_moved(source, place)
            else:
                _copy(source, place, moving)
        except FileExistsError:
            failures.append(f"cannot write {source} to {place}: it already exists")
        except OSError as error:
            failures.append(f"cannot write {source} to {place}: {error.strerror or error}")
        if progress:
            progress(number, len(steps))
    begun.delete_leftovers()
    return Sorted(len(steps) - len(failures), failures)


class _Begun:
    """The moves into a folder that were killed when the new file was complete and the old one still there."""

    def __init__(self, target: Path):
        self._leftovers: dict[Path, Inode] = {}  # temporary files of processes that no longer run
        self._places: dict[Inode, Path] = {}  # files with a second name
        for entry, about in _files(target):
            ours = _TEMPORARY.fullmatch(entry.name)
            if ours and not process_runs(ours[1]):
                self._leftovers[Path(entry.path)] = (about.st_dev, about.st_ino)
            elif not ours and about.st_nlink > 1:
                self._places[about.st_dev, about.st_ino] = Path(entry.path)
        copies = [self._places[inode] for inode in self._leftovers.values() if inode in self._places]
        self._copies = {place.name: place for place in copies}

    def place_of(self, source: Path) -> Path | None:
        """Where this file has been moved to, if only its old name must still be deleted."""
        if not self._places:
            return None
        try:
            about = source.lstat()
            place = self._places.get((about.st_dev, about.st_ino)) if stat.S_ISREG(about.st_mode) else None
            if place is not None:
                # The two names must be two entries, and not one that is seen on two ways. Another name is a link of
                # the user's own.
                moved = not source.parent.samefile(place.parent) and _is_numbered(place, source)
                return place if moved else None
            names = (_numbered(source, n) for n in range(1, len(self._copies) + 2))
            found = [self._copies[name] for name in names if name in self._copies]
            return next((place for place in found if _copied(source, place)), None)
        except OSError:
            return None

    def delete_leftovers(self) -> None:
        for path in self._leftovers:
            with suppress(OSError):
                path.unlink()


def _files(target: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """The ordinary files in the class folders."""
    with suppress(OSError):
        for folder in sorted(path for path in target.iterdir() if path.is_dir()):
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        yield entry, entry.stat(follow_symlinks=False)


def _copy(source: Path, place: Path, moving: bool) -> None:
    temporary = place.with_name(f".trident-{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        shutil.copyfile(source, temporary)
        with suppress(OSError):
            shutil.copystat(source, temporary)
        if moving:
            _flush(temporary)
        if not _linked(temporary, place):
            place.open("xb").close()  # fails if the file exists; renaming would overwrite it
            temporary.replace(place)
        if moving:
            _flush(place.parent)
            _delete_moved(source, place)
    finally:  # the temporary name is deleted last: until then it says that the move is not finished
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _delete_moved(source: Path, place: Path) -> None:
    """Delete a file that was moved. If that is not allowed, it stays where it was, and nowhere else."""
    try:
        source.unlink()
    except OSError:
        with suppress(OSError):
            place.unlink()
        raise


def _linked(source: Path, place: Path) -> bool:
    """Give a file a second name, which fails if that name is taken. False if the file system cannot do that."""
    if source.is_symlink():
        return False
    try:
        place.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _numbered(source: Path, n: int) -> str:
    """The file's name, with a number if it is not the first. The name is cut where it would be too long."""
    if n == 1:
        return source.name
    stem, end = source.stem, f"-{n}{source.suffix}"
    while len(stem) > 1 and len(os.fsencode(stem + end)) > LONGEST_NAME:
        stem = stem[:-1]
    return stem + end


def _is_numbered(place: Path, source: Path) -> bool:
    """Whether a file's name is one that the source would get."""
    number = re.fullmatch(r".*-([0-9]{1,9})", place.stem, re.DOTALL)
    return place.name in (source.name, _numbered(source, int(number[1])) if number else "")


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _copied(source: Path, place: Path) -> bool:
    return place.is_file() and source.is_file() and filecmp.cmp(source, place, shallow=False)
