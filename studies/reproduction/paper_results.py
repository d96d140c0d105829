"""The results of the TRIDENT paper as data: its tables as printed, with notes on doubtful numbers.

    find(test_dataset="cub", n_shot=1, metric="accuracy", method="TRIDENT")

None of them was measured by this package. `PAPER_PROTOCOL` says how the paper measured; show it with the numbers.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trident.errors import TridentError, did_you_mean

FILE = Path(__file__).with_name("paper_results.toml")

Metric = Literal["accuracy", "ece", "mce", "brier", "parameters"]

PAPER_PROTOCOL = (
    "The paper says little about how TRIDENT was measured; the rest is what its released code does. Tasks are 5-way, "
    "balanced, with 10 queries per class: 600 tasks for miniImageNet, 2,000 for tieredImageNet and for CUB. "
    "The images of a task come sorted by class, and AttFEX holds one weight for each position in the task, so the "
    "network can read the class of a query from its place. Latents are sampled once at test, too. Batch norm takes its "
    "statistics from the images at hand. Calibration is scored over 10 bins, after a temperature was fitted on the "
    "very test predictions that are scored. Captions call the ± a standard deviation, the text a 95 % interval over "
    "the tasks; its size fits the interval. A figure obtained on shuffled queries answers a harder question and should "
    "not be ranked against these."
)

_TASKS = {"mini-imagenet": 600, "tiered-imagenet": 2000, "cub": 2000}  # by test dataset


@dataclass(frozen=True)
class PaperResult:
    """One printed number. What a table does not give is None or empty."""

    table: str
    method: str
    metric: Metric
    value: float
    printed: str  # with the paper's own digits
    interval: float | None = None  # the printed ±
    unit: str = ""
    backbone: str | None = None
    approach: str | None = None  # Ind., TF, TI or TF+TI
    extra_data: bool = False
    train_dataset: str | None = None
    test_dataset: str | None = None
    n_way: int | None = None
    n_shot: int | None = None
    part: str | None = None  # of the network, where parameters are counted
    settings: tuple[str, ...] = ()  # overrides that turn the paper's recipe into this row's
    corrected: float | None = None  # the right value, if the number is a misprint
    note: str = ""
    protocol: str = ""  # of TRIDENT's figures; the paper does not give that of the others
    source: str = "the TRIDENT paper"


@dataclass(frozen=True)
class PaperTable:
    name: str
    title: str
    notes: tuple[str, ...]
    results: tuple[PaperResult, ...]


@dataclass(frozen=True)
class PaperTraining:
    """How one model of the paper was trained, as overrides of its recipe."""

    recipe: str
    train_dataset: str
    n_way: int
    n_shot: int
    settings: tuple[str, ...]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    return tuple(_table(name, values) for name, values in _file()["tables"].items())


@cache
def paper_results() -> tuple[PaperResult, ...]:
    return tuple(result for table in paper_tables() for result in table.results)


def paper_table(name: str) -> PaperTable:
    tables = {table.name: table for table in paper_tables()}
    if name not in tables:
        raise TridentError(f"the paper's figures have no table '{name}'{did_you_mean(name, tables)}")
    return tables[name]


@cache
def paper_training() -> tuple[PaperTraining, ...]:
    runs: list[dict[str, Any]] = _file()["training"]["runs"]
    return tuple(PaperTraining(**{**run, "settings": tuple(run["settings"])}) for run in runs)


def paper_training_notes() -> tuple[str, ...]:
    return tuple(_file()["training"]["notes"])


def find(**wanted: Any) -> tuple[PaperResult, ...]:
    """All results whose fields have these values.

    The ablation tables repeat TRIDENT's main results: use `table="accuracy"` to get each once.
    """
    return tuple(
        result for result in paper_results() if all(getattr(result, key) == value for key, value in wanted.items())
    )


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text("utf-8"))


def _table(name: str, values: dict[str, Any]) -> PaperTable:
    results = []
    for row in values["rows"]:
        for column, printed in row["figures"].items():
            fields = {**values["common"], **values["columns"][column], **row}
            of_figure = {key: fields.pop(key, {}).get(column) for key in ("corrected", "notes", "figures")}
            value, interval = _numbers(printed)
            result = PaperResult(
                **{
                    **fields,
                    "table": name,
                    "value": value,
                    "interval": interval,
                    "printed": printed,
                    "settings": tuple(fields.get("settings", ())),
                    "corrected": of_figure["corrected"],
                    "note": of_figure["notes"] or fields.get("note", ""),
                }
            )
            results.append(_with_protocol(result))
    return PaperTable(name, values["title"], tuple(values["notes"]), tuple(results))


def _numbers(printed: str) -> tuple[float, float | None]:
    """The value and its ±, from text such as '86.11 ± 0.59', '412,238' or '12.4M'."""
    value, _, interval = printed.replace(",", "").partition(" ± ")
    if value.endswith("M"):
        return float(round(float(value[:-1]) * 1e6)), None
    return float(value), float(interval) if interval else None


def _with_protocol(result: PaperResult) -> PaperResult:
    if result.method != "TRIDENT" or result.protocol or result.test_dataset is None:
        return result
    # The paper gives the number of tasks for accuracy, but not for calibration.
    last = (
        f"{_TASKS[result.test_dataset]} tasks"
        if result.metric == "accuracy"
        else "temperature fitted on the test predictions scored"
    )
    return replace(
        result,
        protocol=f"{result.n_way}-way {result.n_shot}-shot, 10 queries per class, class-sorted queries, balanced, "
        f"transductive batch norm, one latent sample, {last}",
    )
