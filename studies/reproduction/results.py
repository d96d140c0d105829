"""The kept results: one file, with a line for each model."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trident
from trident.errors import TridentError, errors_in
from trident.measuring.record import FILE_NAME, Record, change_line, in_todays_form, read_json, read_lines
from trident.recipes.plain_values import checked

FOLDER = Path(__file__).parent
ORDERS = ("class_sorted", "shuffled")  # of the queries
ORDER_NAMES = {"class_sorted": "sorted by class", "shuffled": "shuffled"}


@dataclass(frozen=True)
class Source:
    """What a measurement was made on, and by."""

    tasks: int
    fingerprint: str  # of the store
    device: str
    engine: str
    precision: str
    seconds: float


@dataclass(frozen=True)
class BothOrders:
    """The same tasks with both orders. An order without a result has a problem."""

    orders: dict[str, Record]  # accuracy and calibration: without a temperature, and with each that is fitted
    problems: dict[str, str]  # by order: why there is no result
    difference: float | None  # points that sorting the queries brings, paired by task
    difference_ci95: float | None
    source: Source


@dataclass(frozen=True)
class Latents:
    """Davies-Bouldin scores over many tasks, and the latents of one task in two dimensions."""

    scores: dict[str, dict[str, Any]]  # by order, as `Decoupling.to_json` gives them
    points: dict[str, list[dict[str, Any]]]  # of one task, by order: titles, and (query, 2) places
    labels: dict[str, list[int]]  # of the queries of that task, by order
    source: Source


@dataclass(frozen=True)
class Decoded:
    """How well images are decoded from their latents."""

    squared_error: float  # summed over an image, mean over the queries of all tasks
    squared_error_of_mean: float  # if each query is replaced by the mean query of its task
    mean_ratio: float  # of the two, mean over the tasks: one if the decoder is no better than that
    mean_ratio_ci95: float


@dataclass(frozen=True)
class Reconstructed:
    """With both orders of the queries, and a picture of what is decoded when latents are swapped."""

    orders: dict[str, Decoded]
    protocol: str
    picture: str  # a JPEG in base64: decoded images, label latents by row, semantic latents by column
    source: Source


Part = BothOrders | Latents | Reconstructed


@dataclass(frozen=True)
class ModelResults:
    """All results of one model, and how it was made."""

    made_from: str  # weights, or recipe and settings
    digest: str  # of the weights file; empty if the training failed before the first validation
    n_shot: int
    trained_order: str  # of the queries in training
    asked_steps: int  # 0 for included weights
    steps: int  # trained
    best_step: int | None  # whose weights are measured
    paper_steps: int  # of the paper's training
    parameters: int
    training_seconds: float | None = None  # None: not known
    training_device: str = ""
    error: str | None = None  # why the training ended early
    measured: dict[str, BothOrders] = field(default_factory=dict)  # by dataset
    latents: dict[str, Latents] = field(default_factory=dict)
    reconstructions: dict[str, Reconstructed] = field(default_factory=dict)
    trident: str = trident.__version__

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for dataset, both in self.measured.items():
            values["measured"][dataset]["orders"] = {order: one.to_json() for order, one in both.orders.items()}
        return values

    def part(self, kind: str) -> dict[str, Part]:
        """The results that a kind of panel shows, by dataset."""
        found: dict[str, Part] = getattr(self, part_of(kind))
        return found


def part_of(kind: str) -> str:
    """The field of `ModelResults` that a kind of panel shows."""
    return kind if kind in ("latents", "reconstructions") else "measured"


def read(name: str, folder: Path = FOLDER) -> ModelResults | None:
    """The results of a model; None if it has none. Older folders have a file for each model."""
    path, older = folder / FILE_NAME, folder / f"{name}.json"
    values = read_lines(path).get(name)
    if values is None and older.is_file():
        path, values = older, read_json(older)
    if values is None:
        return None
    with errors_in(f"{path}: the results of {name} are damaged"):
        found: ModelResults = checked(ModelResults, _in_todays_form(values))
        return found


def has_results(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file() or any(folder.glob("*.json"))


def update_results(name: str, change: Callable[[ModelResults | None], ModelResults], folder: Path) -> None:
    """Change the results of a model. Other processes may do the same at the same time."""
    change_line(folder / FILE_NAME, name, lambda _: change(read(name, folder)).to_json())


def _in_todays_form(values: Any) -> Any:
    """In older files, the tasks and the data of a measurement stand beside it alone."""
    try:
        for both in values.get("measured", {}).values():
            on = {"tasks": both["source"]["tasks"], "data": both["source"]["fingerprint"]}
            both["orders"] = {order: on | in_todays_form(one) for order, one in both["orders"].items()}
    except (AttributeError, KeyError, TypeError):
        raise TridentError("its measurements have another form") from None
    return values
