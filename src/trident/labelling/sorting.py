"""Sorts files into class folders. Never overwrites a file."""

import filecmp
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from trident.errors import TridentError

Step = tuple[Path, Path]  # from, to


def plan(labels: dict[Path, str], target: Path, moving: bool) -> list[Step]:
    """Where each labelled file goes: target/label/name, or name-2 and so on if the name is taken.

    Files that are already in place, or already copied there, are skipped.
    """
    if target.exists() and not target.is_dir():
        raise TridentError(f"{target} is a file: give a folder for the pictures")
    taken: set[Path] = set()
    steps = []
    for source, label in labels.items():
        folder = target / label
        if _same(source, folder / source.name) or (not moving and _copied(source, folder / source.name)):
            continue
        names = (source.name if n == 1 else f"{source.stem}-{n}{source.suffix}" for n in count(1))
        place = next(
            folder / name for name in names if folder / name not in taken and not os.path.lexists(folder / name)
        )
        taken.add(place)
        steps.append((source, place))
    return steps


def carry_out(steps: list[Step], moving: bool) -> None:
    """Copy or move each file, completely or not at all. Never overwrites a file."""
    for source, place in steps:
        temporary = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary)
            with suppress(OSError):
                shutil.copystat(source, temporary)
            place.open("xb").close()  # fails if the file exists; renaming would overwrite it
            temporary.replace(place)
            if moving:
                source.unlink()
        except FileExistsError as error:
            raise TridentError(f"cannot write {place}: it already exists") from error
        except OSError as error:
            raise TridentError(f"cannot write {source} to {place}: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _copied(source: Path, place: Path) -> bool:
    return place.is_file() and source.is_file() and filecmp.cmp(source, place, shallow=False)
