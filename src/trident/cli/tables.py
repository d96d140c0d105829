"""Tables in plain text."""

from collections.abc import Sequence

from trident.errors import one_line


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ", numbers: bool = False) -> list[str]:
    """Rows with their columns aligned to the left; with `numbers`, all but the first column to the right."""
    rows = [[one_line(entry) for entry in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        rest = [
            entry.rjust(width) if numbers else entry.ljust(width)
            for entry, width in zip(row[1:], widths[1:], strict=True)
        ]
        return gap.join([row[0].ljust(widths[0]), *rest]).rstrip()

    return [line(row) for row in rows]
