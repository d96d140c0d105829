"""The kept results: one JSON file for each model."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trident
from trident.files import atomic_file
from trident.grids.files import read_json

FOLDER = Path(__file__).with_name("results")
ORDERS = ("class_sorted", "shuffled")  # of the queries
ORDER_NAMES = {"class_sorted": "sorted by class", "shuffled": "shuffled"}


@dataclass(frozen=True)
class Calibrated:
    """Calibration at one temperature."""

    ece: float
    mce: float
    brier: float
    temperature: float


@dataclass(frozen=True)
class Measured:
    """A model on tasks of one dataset, with one order of the queries."""

    accuracy: float  # percent
    ci95: float  # half width
    protocol: str
    calibration: dict[str, Calibrated]  # by what the temperature was fitted on: none, validation, paper


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

    orders: dict[str, Measured]
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

    def part(self, kind: str) -> dict[str, Part]:
        """The results that a kind of panel shows, by dataset."""
        found: dict[str, Part] = getattr(self, part_of(kind))
        return found


def part_of(kind: str) -> str:
    """The field of `ModelResults` that a kind of panel shows."""
    return kind if kind in ("latents", "reconstructions") else "measured"


def read(name: str, folder: Path = FOLDER) -> ModelResults | None:
    """The results of a model; None if it has none."""
    path = folder / f"{name}.json"
    kept: ModelResults | None = read_json(ModelResults, path) if path.is_file() else None
    return kept


def update_results(name: str, change: Callable[[ModelResults | None], ModelResults], folder: Path) -> None:
    """Change the results of a model in its file, under a lock: other processes may do the same at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = json.dumps(asdict(change(read(name, folder))), indent=1, ensure_ascii=False, allow_nan=False)
        with atomic_file(folder / f"{name}.json") as file:
            file.write((content + "\n").encode())
