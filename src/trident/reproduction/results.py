"""The kept results: one JSON file for each model."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import trident
from trident.ablations.files import checked, errors_in
from trident.errors import TridentError
from trident.files import atomic_file

FOLDER = Path(__file__).with_name("results")
ORDERS = ("class_sorted", "shuffled")  # of the queries


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
    tasks: int
    protocol: str
    calibration: dict[str, Calibrated]  # by what the temperature was fitted on: none, validation, paper


@dataclass(frozen=True)
class BothOrders:
    """The same tasks with both orders."""

    orders: dict[str, Measured]
    difference: float  # points that sorting the queries brings, paired by task
    difference_ci95: float
    seconds: float  # of measuring
    device: str
    fingerprint: str  # of the store


@dataclass(frozen=True)
class Latents:
    """Davies-Bouldin scores over many tasks, and the projected latents of one task."""

    scores: dict[str, Any]  # as `Decoupling.to_json` gives them
    points: list[dict[str, Any]]  # of one task: panel title, and (query, 2) places
    labels: list[int]  # of the queries of that task
    seconds: float
    device: str
    fingerprint: str


@dataclass(frozen=True)
class Reconstructed:
    """How well images are decoded from their latents, and what they show when latents are swapped."""

    squared_error: float  # summed over an image, mean over the queries of all tasks
    squared_error_of_mean: float  # if each query is replaced by the mean query of its task
    ratio_ci95: float  # half width of the interval of the tasks' ratios, whose mean is about one for a useless decoder
    ratio: float
    tasks: int
    protocol: str
    picture: str  # a JPEG in base64: decoded images, label latents by row, semantic latents by column
    seconds: float
    device: str
    fingerprint: str


@dataclass(frozen=True)
class Kept:
    """All that is known of one model."""

    source: str  # what made it: weights or recipe and settings
    n_shot: int
    trained_order: str  # of the queries in training
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


def read(name: str, folder: Path = FOLDER) -> Kept | None:
    """The results of a model; None if it has none."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    with errors_in(f"{path} is damaged"):
        try:
            kept: Kept = checked(Kept, json.loads(path.read_text("utf-8")))
        except ValueError as error:
            raise TridentError(str(error)) from None
        return kept


def keep(name: str, kept: Kept, folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / f"{name}.json") as file:
        file.write((json.dumps(asdict(kept), indent=1, ensure_ascii=False) + "\n").encode())


def part_of(kind: str) -> str:
    """The field of `Kept` that a kind of panel shows."""
    return kind if kind in ("latents", "reconstructions") else "measured"


def extended(kept: Kept, part: str, dataset: str, found: BothOrders | Latents | Reconstructed) -> Kept:
    return replace(kept, **{part: getattr(kept, part) | {dataset: found}})
