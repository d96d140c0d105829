"""docs/leaderboard.md, from the kept results."""

from pathlib import Path

from studies.documents import introduction_before
from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.grids.tables import markdown_table
from trident.leaderboard.results import FOLDER, REFERENCE, Line, lines_of, missing, tasks_by_condition
from trident.leaderboard.rows import BOARDS, Board, Row
from trident.learning.run_start import STAGE_PREFIX
from trident.recipes.files import read_toml

LAST_HEADING = "## Not in the table"
TITLES = {
    "balanced": "as many queries of each class",
    "dirichlet": "class counts drawn from Dirichlet(2)",
    "alone": "each query classified alone",
}
HEADINGS = {
    "balanced": "balanced",
    "dirichlet": "Dirichlet(2)",
    "alone": "alone",
}


# The systems of the paper's tables that are not measured: each with a title, and why.
ABSENT: list[dict[str, str]] = read_toml(Path(__file__).with_name("absent.toml"))["absent"]


def introduction_of(path: Path) -> str:
    return introduction_before("## ", path, "Methods side by side", LAST_HEADING)


def whole_document(introduction: str, folder: Path = FOLDER) -> str:
    """Everything after the introduction is made from the results."""
    parts = [introduction.rstrip("\n"), ""]
    for board in BOARDS.values():
        parts += _section(board, folder)
    parts += [LAST_HEADING, ""]
    parts += markdown_table([("system", "why"), *((system["title"], system["why"]) for system in ABSENT)])
    return "\n".join([*parts, ""])


def _section(board: Board, folder: Path) -> list[str]:
    lines = lines_of(board, folder)
    if not lines:
        return []
    counts = tasks_by_condition(lines)
    tasks = ", ".join(f"{counts[name]} tasks with {TITLES[name]}" for name in board.conditions if name in counts)
    headings = [
        "method",
        *(f"{HEADINGS[name]}, %" for name in board.conditions),
        f"points above {REFERENCE}",
        "ECE",
        "parameters",
        "network",
        "takes for granted",
        "published",
    ]
    text = [f"## {board.title}", "", f"{tasks}; shuffled queries, 95 % intervals, seed 0.", ""]
    text += markdown_table([headings, *map(_cells, lines)])
    waiting = missing(board, folder)
    if waiting:
        text += ["", f"Not measured yet: {', '.join(waiting)}."]
    return [*text, ""]


def _cells(line: Line) -> list[str]:
    row = line.row
    return [
        f"{row.title} ({_names(row)})",
        *map(line.figure, line.board.conditions),
        line.above,
        line.ece,
        f"{line.balanced.parameters:,}",
        network_of(line),
        row.assumes,
        "; ".join(part for part in (line.published, row.note) if part),
    ]


def network_of(line: Line) -> str:
    """What the network was before training, and what differs from most others."""
    recipe = line.row.recipe_on(line.board)
    if isinstance(recipe.backbone, FrozenBackbone):
        return "frozen"
    start = recipe.training.start_from
    own = start is None or start.startswith(STAGE_PREFIX)  # an earlier stage of the same training is its own
    parts = ["own" if own else f"own, from {start}"]
    if isinstance(recipe.backbone, Conv4Backbone) and recipe.backbone.activation == "leaky_relu":
        parts.append("LeakyReLU")
    if line.row.batch_norm == "transductive":
        parts.append("batch norm of the task's images")
    return ", ".join(parts)


def _names(row: Row) -> str:
    """The row's name, and the method's name and settings where they are others."""
    if row.name == row.method:
        return f"`{row.name}`"
    return ", ".join([f"`{row.name}`: method `{row.method}`", *(f"`{setting}`" for setting in row.settings)])
