"""Files into class folders, without ever writing over one."""

import os
import shutil
from itertools import count
from pathlib import Path

from trident.errors import TridentError

Step = tuple[Path, Path]  # from, to


def plan(labels: dict[Path, str], target: Path) -> list[Step]:
    """Where each labelled file goes: target/label/name, or name-2 and so on where that is taken."""
    taken: set[Path] = set()
    steps = []
    for source, label in labels.items():
        folder = target / label
        names = (source.name if n == 1 else f"{source.stem}-{n}{source.suffix}" for n in count(1))
        place = next(folder / name for name in names if folder / name not in taken and not _exists(folder / name))
        taken.add(place)
        steps.append((source, place))
    return steps


def carry_out(steps: list[Step], moving: bool) -> None:
    """Copy or move each file; what has come to stand at its place since it was planned is not written over."""
    for source, place in steps:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as old, place.open("xb") as new:
                shutil.copyfileobj(old, new)
            shutil.copystat(source, place)
            if moving:
                source.unlink()
        except FileExistsError as error:
            raise TridentError(f"cannot write {error.filename}: there is a file already") from error
        except OSError as error:
            raise TridentError(f"cannot bring {source} to {place}: {error.strerror or error}") from error


def _exists(path: Path) -> bool:
    return os.path.lexists(path)
