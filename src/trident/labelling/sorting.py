"""Files into class folders, without ever writing over one."""

import filecmp
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from trident.errors import TridentError

Step = tuple[Path, Path]  # from, to


def plan(labels: dict[Path, str], target: Path, moving: bool) -> list[Step]:
    """Where each labelled file goes: target/label/name, or name-2 and so on where that is taken.

    A file that lies in its place already stays there, and of one that has been copied there no second copy is made.
    """
    if target.exists() and not target.is_dir():
        raise TridentError(f"{target} is a file: a folder is needed to put pictures into")
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
    """Copy or move each file. It comes to its place whole or not at all, and never over another."""
    for source, place in steps:
        temporary = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary)
            with suppress(OSError):
                shutil.copystat(source, temporary)
            place.open("xb").close()  # takes the place if it is free, which renaming does not ask
            temporary.replace(place)
            if moving:
                source.unlink()
        except FileExistsError as error:
            raise TridentError(f"cannot write {place}: there is a file already") from error
        except OSError as error:
            raise TridentError(f"cannot bring {source} to {place}: {error.strerror or error}") from error
        finally:
            temporary.unlink(missing_ok=True)


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _copied(source: Path, place: Path) -> bool:
    return place.is_file() and source.is_file() and filecmp.cmp(source, place, shallow=False)
