"""What the methods are measured on: datasets, shots, queries and class counts."""

from dataclasses import dataclass

from trident.errors import TridentError, did_you_mean
from trident.settings import EpisodeSpec, Protocol

CONDITIONS = {  # by name: what differs from balanced piles
    "balanced": Protocol(),
    "dirichlet": Protocol(balance="dirichlet"),
    "alone": Protocol(queries_at_once="one"),
}
TITLES = {
    "balanced": "as many queries of each class",
    "dirichlet": "class counts drawn from Dirichlet(2)",
    "alone": "each query classified alone",
}
FEWER_TASKS_ALONE = 5  # classifying each query alone costs as much as a task, so a fifth of the tasks are measured


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    data: str  # which store it needs: mini, cub or glyphs
    trained_on: str  # the beginning of the names of recipes and weights
    episode: EpisodeSpec
    conditions: tuple[str, ...]
    classifier: str  # weights of a classifier of all training classes, for methods on frozen features

    @property
    def shape(self) -> str:
        """The part of the names of recipes and weights that tells ways and shots, for example -5w1s."""
        return f"-{self.episode.n_way}w{self.episode.n_shot}s" if self.trained_on == "mini" else ""


def _mini(data: str, title: str, shot: int, queries: int, *conditions: str) -> Board:
    name = f"{data}-{shot}-shot" + ("" if queries == 15 else f"-{queries}-queries")
    plural = "s" if shot > 1 else ""
    return Board(
        name,
        f"{title}, 5 ways, {shot} shot{plural}, {queries} queries per class",
        data,
        "mini",
        EpisodeSpec(5, shot, queries),
        ("balanced", *conditions),
        "mini-simpleshot",
    )


BOARDS = {
    board.name: board
    for board in [
        *(_mini("mini", "miniImageNet", shot, 15, "dirichlet", "alone") for shot in (1, 5)),
        *(_mini("mini", "miniImageNet", shot, 10) for shot in (1, 5)),
        *(_mini("cub", "miniImageNet to CUB", shot, 15, "dirichlet") for shot in (1, 5)),
        Board(
            "glyphs",
            "letters of unseen scripts, 5 ways, 1 shot, 5 queries per class",
            "glyphs",
            "glyphs",
            EpisodeSpec(5, 1, 5),
            ("balanced", "dirichlet", "alone"),
            "glyphs-simpleshot",
        ),
    ]
}


def board_called(name: str) -> Board:
    if name not in BOARDS:
        raise TridentError(f"no board is called '{name}'{did_you_mean(name, BOARDS)}")
    return BOARDS[name]
