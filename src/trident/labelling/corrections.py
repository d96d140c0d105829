"""Corrections that a user wrote into the table of `trident predict`: the right class, or 'none of these'."""

import csv
from pathlib import Path

from trident.errors import TridentError
from trident.labelling.spreadsheets import unguarded

NONE = "none of these"  # in the column `correction`: the picture belongs to no class
COLUMN = "correction"


def read_corrections(path: Path) -> dict[str, str]:
    """The corrected class of each corrected picture, by its path as the table has it.

    Spreadsheets may put a byte order mark at the start, or semicolons in place of commas.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            head = file.readline()
            file.seek(0)
            table = csv.DictReader(file, delimiter=";" if "," not in head and ";" in head else ",")
            columns = table.fieldnames or []
            if "path" not in columns or COLUMN not in columns:
                raise TridentError(
                    f"{path} has no columns 'path' and '{COLUMN}': it must be a table that 'trident predict' wrote, "
                    f"with the right class in '{COLUMN}' where the label is wrong"
                )
            found: dict[str, str] = {}
            for row in table:
                name, wanted = unguarded(row["path"] or ""), unguarded((row[COLUMN] or "").strip())
                if not wanted:
                    continue
                if found.get(name, wanted) != wanted:
                    raise TridentError(f"{path} corrects {name} twice: to '{found[name]}' and to '{wanted}'")
                found[name] = wanted
            return found
    except (OSError, csv.Error) as error:
        raise TridentError(f"cannot read {path}: {error}") from error
