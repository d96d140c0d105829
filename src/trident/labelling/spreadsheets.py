"""Cells of tables that spreadsheets must not take for formulas. `web/static/spreadsheets.js` does the same."""

import re

# A formula begins with one of the last characters (some are wide variants), at the start of a cell, or where another
# separator, or quotation marks that are not closed, may start a new cell. Apostrophes in between come from guarding.
_START = r"(^|[;,|\"\x00-\x1f])('*)"
_FORMULA = r"(?=[=+\-@\uff1d\uff0b\uff0d\uff20])"
_OPEN = re.compile(_START + _FORMULA)
_GUARDED = re.compile(_START + "'" + _FORMULA)


def guarded(text: str) -> str:
    """With an apostrophe before whatever a spreadsheet would take for a formula; other texts stay as they are."""
    return _OPEN.sub(r"\1\2'", text)


def unguarded(text: str) -> str:
    """What `guarded` was given."""
    return _GUARDED.sub(r"\1\2", text) if "'" in text else text
