"""Sorts files into class folders. Never overwrites a file, and never loses one, also if others sort the same files.

A file that is moved gets its new name before it loses the old one. The new name is never deleted again, because another
process may have deleted the old one meanwhile. Until the old name is gone, the file also has a temporary name beside
the new one (where the file system has hard links). If a move is killed, the next run finds the temporary name and
deletes the old one, whatever its label is then.
"""

import errno
import filecmp
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from trident.errors import TridentError, errors_in
from trident.files import LONGEST_NAME, delete_leftover, flush, temporary_file, temporary_path
from trident.labelling.class_names import NONE
from trident.labelling.tables import mark_of, read_corrections
from trident.progress import Progress
from trident.settings import require

Step = tuple[Path, Path]  # from, to

_NUMBER = re.compile(r"-[0-9]{1,9}(?=(\.[^.]*)?$)")  # at the end of a name, before .png
_LEFTOVERS = "*/.trident-*"
# What a file system says that gives no second names, or not to this file.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class ToSort(NamedTuple):
    """What a table of `trident predict` says about sorting."""

    labels: dict[Path, str]  # pictures that can be sorted
    there: list[Path]  # pictures that are in the folder already: moved there before
    problems: list[str]  # one line for each picture that is not as the table says
    left: list[Path]  # copies, or moved pictures, in the folder of another class than the table says now


def pictures_to_sort(table: Path, target: Path, moving: bool, progress: Progress) -> ToSort:
    """The labelled pictures of a table, if they are still the ones that were labelled.

    Pictures that are in a class folder of `target`, whatever path leads to them, are left out.
    """
    read = read_corrections(table)
    labels: dict[Path, str] = {}
    marks: dict[Path, str] = {}
    with errors_in(table):
        for row in read.rows:
            path, label = Path(row.path), row.right_label()
            if labels.setdefault(path, label) != label:
                raise TridentError(f"{path} has two labels: '{labels[path]}' and '{label}'")
            require("\0" not in row.path, "it has a path with a NUL character")
            marks[path] = marks.get(path) or row.mark
    to_sort = ToSort({}, [], [], [])
    sorted_before = _by_name(target)
    folders = {Path(os.path.realpath(target), label) for label in labels.values() if label not in ("", NONE)}
    labelled: dict[Path, str] = {}  # and those of no class, whose copies may be somewhere
    for number, (path, label) in enumerate(labels.items(), 1):
        mark, kept, folder = marks[path], label not in ("", NONE), Path(os.path.realpath(path)).parent
        if folder in folders:
            (to_sort.there if folder.name == label else to_sort.left).append(path)
        elif os.path.lexists(path):
            labelled[path] = label
            problem = _not_as_labelled(path, mark) if kept else None
            if problem:
                to_sort.problems.append(problem)
            elif kept:
                to_sort.labels[path] = label
        else:
            before = [place for place in sorted_before.get(path.name, []) if not _not_as_labelled(place, mark)]
            if any(place.parent.name == label for place in before):
                to_sort.there.append(path)
            elif before:
                to_sort.left.append(before[0])
            elif kept:
                to_sort.problems.append(f"{path}: it is no longer there")
        progress(number, len(labels))
    return to_sort._replace(left=to_sort.left + ([] if moving else copies_elsewhere(labelled, target)))


def _not_as_labelled(path: Path, mark: str) -> str | None:
    """Why this is not the picture that was labelled; None if it is, as far as the table can tell."""
    from trident.data.images import ImageFile

    try:
        key = ImageFile(path).key()
    except TridentError as error:
        return str(error)
    if mark and mark != mark_of(ImageFile(path), key):
        return f"{path} is another picture than the one that was labelled: label it again"
    return None


def strangers(table: Path, steps: list[Step]) -> list[Path]:
    """Files in the folders that pictures go to, which are none of the table's pictures, by name and content."""
    marks: dict[str, list[str]] = {}
    for row in read_corrections(table).rows:
        marks.setdefault(Path(row.path).name, []).append(row.mark)

    def known(file: Path) -> bool:
        possible = [mark for name in {file.name, _NUMBER.sub("", file.name)} for mark in marks.get(name, [])]
        return any(_not_as_labelled(file, mark) is None for mark in possible)

    files = (file for folder in sorted({place.parent for _, place in steps}) for file in sorted(folder.glob("[!.]*")))
    return [file for file in files if not known(file)]


def plan(labels: dict[Path, str], target: Path, moving: bool) -> list[Step]:
    """Where each labelled file goes: target/label/name, or name-2 and so on if the name is taken.

    Files that are already in place, or already copied there, are skipped.
    """
    if target.exists() and not target.is_dir():
        raise TridentError(f"{target} is a file: give a folder for the pictures")
    for label in labels.values():
        if label in ("", ".", "..") or "/" in label or "\0" in label or len(os.fsencode(label)) > LONGEST_NAME:
            raise TridentError(f"class {label!r} cannot be the name of a folder in {target}")
    half_moved = _half_moved(target.glob(_LEFTOVERS)) if moving else []
    taken: set[Path] = set()
    steps = []
    for source, label in labels.items():
        begun, _ = _begun(source, half_moved)
        if begun and begun not in taken:
            taken.add(begun)
            steps.append((source, begun))
            continue
        folder = target / label
        if _same(source, folder / source.name):
            # With a name in another folder, too: a move that was killed, and only has to delete that one.
            if moving and not source.is_symlink() and not source.parent.samefile(folder):
                steps.append((source, folder / source.name))
            continue
        places = (folder / _numbered(source, n) for n in count(1))
        free = (place for place in places if place not in taken)
        # A copy that is there already has the first name with its content, or is still to be made.
        place = next(place for place in free if not os.path.lexists(place) or (not moving and _copied(source, place)))
        taken.add(place)
        if not os.path.lexists(place):
            steps.append((source, place))
    return steps


def copies_elsewhere(labels: dict[Path, str], target: Path) -> list[Path]:
    """Copies of these files in folders of other classes than their label: from before the label was corrected."""
    there = _by_name(target)
    return [
        place
        for source, label in labels.items()
        for place in there.get(source.name, [])
        if place.parent.name != label and _is_numbered(place, source) and _copied(source, place)
    ]


def _by_name(target: Path) -> dict[str, list[Path]]:
    """The files in class folders, by the name that they may have had before they got a number."""
    there: dict[str, list[Path]] = {}
    for path in target.glob("*/*"):
        for name in {path.name, _NUMBER.sub("", path.name)}:
            there.setdefault(name, []).append(path)
    return there


def carry_out(steps: list[Step], target: Path, moving: bool, progress: Progress | None = None) -> tuple[int, list[str]]:
    """Copy or move each file, completely or not at all. Never overwrites a file. A failure does not stop the others.

    Returns how many files were sorted, and a line for each one that could not be.
    Temporary files of killed processes are deleted at the end, when the moves that they belong to are finished.
    """
    leftovers = list(target.glob(_LEFTOVERS))
    half_moved = _half_moved(leftovers) if moving else []
    failures = []
    for number, (source, place) in enumerate(steps, 1):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            before = source.stat()
            begun, mark = _begun(source, half_moved)
            if begun == place:
                flush(place, place.parent)
                _delete_moved(source, place, before)
                mark.unlink(missing_ok=True)
            else:
                with _written(source, place, moving):
                    if moving:
                        _delete_moved(source, place, before)
        except TridentError as error:
            failures.append(str(error))
        except OSError as error:
            known = {FileExistsError: "it already exists", FileNotFoundError: "it is no longer there"}
            why = known.get(type(error)) or error.strerror or error
            failures.append(f"cannot write {source} to {place}: {why}")
        if progress:
            progress(number, len(steps))
    for path in leftovers:
        delete_leftover(path)
    return len(steps) - len(failures), failures


def _half_moved(leftovers: Iterable[Path]) -> list[Step]:
    """New files of moves that may not have deleted the old one yet, and the temporary names that these have, too."""
    return [(place, mark) for mark in leftovers for place in mark.parent.iterdir() if _same(place, mark)]


def _begun(source: Path, half_moved: list[Step]) -> Step | tuple[None, Path]:
    """Where this file has been moved to, if only its old name must still be deleted, and the temporary name there."""
    for place, mark in half_moved:
        with suppress(OSError):
            # In one folder that is seen on two ways, the two names are one.
            elsewhere = _is_numbered(place, source) and not source.parent.samefile(place.parent)
            if elsewhere and (_same if mark.suffix == ".link" else _copied)(source, place):
                return place, mark
    return None, source


@contextmanager
def _written(source: Path, place: Path, moving: bool) -> Iterator[None]:
    """Give a file, or a copy of it, its new name. Beside this it has a temporary one until the end."""
    if moving and not os.access(source.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the old file could not be deleted")
    mark = temporary_path(place.parent, "link")
    if moving and _linked(source, mark):
        try:
            with suppress(FileExistsError):  # some network disks say so of what they have just written
                place.hardlink_to(source)
            if not _same(source, place):
                raise FileExistsError(errno.EEXIST, "it already exists")
            yield
        finally:
            if not _same(source, place):  # while the old name is there, the mark lets the next run finish the move
                mark.unlink(missing_ok=True)
        return
    with temporary_file(place.parent) as (temporary, _):
        shutil.copyfile(source, temporary)
        with suppress(OSError):
            shutil.copystat(source, temporary)
        if moving:
            flush(temporary)
        if not _linked(temporary, place):
            place.open("xb").close()  # fails if the file exists; renaming would overwrite it
            try:
                temporary.replace(place)
            except OSError:
                place.unlink()  # it is still empty
                raise
        if moving:
            flush(place.parent)
        yield


def _delete_moved(source: Path, place: Path, before: os.stat_result) -> None:
    """Delete the old name of a file that has the new one."""
    try:
        now = source.stat()
        if any(getattr(now, one) != getattr(before, one) for one in ("st_dev", "st_ino", "st_size", "st_mtime_ns")):
            raise OSError(errno.EBUSY, "it has been changed meanwhile")
        source.unlink()
    except OSError as error:
        twice = "another process has moved it at the same time, perhaps to another place"
        why = twice if isinstance(error, FileNotFoundError) else f"the old file is still there: {error.strerror}"
        raise TridentError(f"{source} is in {place} now, but {why}") from error


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
    with suppress(OSError):
        return one.samefile(other)
    return False


def _copied(source: Path, place: Path) -> bool:
    with suppress(OSError):
        return place.is_file() and source.is_file() and filecmp.cmp(source, place, shallow=False)
    return False
