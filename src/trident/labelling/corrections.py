"""Corrections that a user wrote into the table of `trident predict`: the right class, or 'none of these'."""

import csv
from pathlib import Path

from trident.errors import TridentError
from trident.labelling.spreadsheets import unguarded

NONE = "none of these"  # in the column `correction`: the picture belongs to no class
COLUMN = "correction"


def is_none(name: str) -> bool:
    """Whether a name means no class: in capital letters too, or as the column is called, none_of_these."""
    return name.casefold().replace("_", " ") == NONE


def read_corrections(path: Path) -> dict[str, str]:
    """The corrected class of each corrected picture, by its path as the table has it.

    Spreadsheets may put a byte order mark at the start, semicolons or tabs in place of commas, and capital letters.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            for delimiter in ",;\t":
                file.seek(0)
                table = csv.DictReader(file, delimiter=delimiter)
                if {"path", COLUMN} <= set(table.fieldnames or []):
                    break
            else:
                raise TridentError(
                    f"{path} has no columns 'path' and '{COLUMN}': it must be a CSV table that 'trident predict' "
                    f"wrote, with the right class in '{COLUMN}' where the label is wrong"
                )
            found: dict[str, str] = {}
            for row in table:
                name, wanted = unguarded(row["path"] or ""), unguarded((row[COLUMN] or "").strip())
                if not wanted:
                    continue
                if is_none(wanted):
                    wanted = NONE
                if found.get(name, wanted) != wanted:
                    raise TridentError(f"{path} corrects {name} twice: to '{found[name]}' and to '{wanted}'")
                found[name] = wanted
            return found
    except OSError as error:
        raise TridentError(f"cannot read {path}: {error.strerror}") from error
    except csv.Error as error:
        raise TridentError(f"cannot read {path}: {error}") from error
