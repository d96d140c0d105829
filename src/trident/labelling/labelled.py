"""`Labelled`, the result of labelling a pile."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from trident.errors import BadValueError, NotFiniteError, TridentError


class Expected(NamedTuple):
    """The share of labels that will be right, judged by labelled pictures that were left out."""

    share: float  # from 0 to 1, as the bounds of its 95 % interval
    low: float
    high: float
    n_left_out: int  # pictures that it was judged by

    def describe(self, labels: str = "these labels") -> str:
        return (
            f"about {100 * self.share:.0f} % of {labels} will be right ({100 * self.low:.0f} to "
            f"{100 * self.high:.0f} %, judged by leaving out {self.n_left_out} labelled pictures in turn)"
        )


@dataclass(frozen=True)
class Labelled:
    """The labels of a pile."""

    classes: tuple[str, ...]
    probabilities: np.ndarray  # (picture, class) float64; a row of NaN for a picture that could not be read
    failures: dict[int, str] = field(default_factory=dict)  # error messages, by the picture's index
    typicality: np.ndarray | None = None  # (picture,) float64, see `typicality.py`; None if it cannot be judged
    least_typical: float = 0.0  # pictures with less typicality belong to none of the classes
    expected: Expected | None = None  # how many of the labels will be right; None if it cannot be judged
    keys: dict[int, bytes] = field(default_factory=dict)  # of the pictures' content, as far as they were needed

    def __post_init__(self) -> None:
        numbers = [self.probabilities] if self.typicality is None else [self.probabilities, self.typicality]
        if not all(np.isfinite(np.delete(of_all, list(self.failures), 0)).all() for of_all in numbers):
            raise NotFiniteError(
                "the prediction is not finite: the weights have a NaN, infinity, or numbers that are too large"
            )

    def with_failures(self, failures: dict[int, str]) -> "Labelled":
        """The labels of a pile that has unreadable pictures too, at the places of `failures`. They get rows of NaN."""
        n_pictures = len(self.probabilities) + len(failures)
        readable = [place for place in range(n_pictures) if place not in failures]

        def of_all(rows: np.ndarray) -> np.ndarray:
            numbers = np.full((n_pictures, *rows.shape[1:]), np.nan)
            numbers[readable] = rows
            return numbers

        typicality = None if self.typicality is None else of_all(self.typicality)
        return replace(self, probabilities=of_all(self.probabilities), failures=failures, typicality=typicality)

    def ranking(self, picture: int) -> list[tuple[str, float]]:
        """Classes with their probabilities, the most likely first."""
        row = self.probabilities[picture]
        return [(self.classes[i], float(row[i])) for i in np.argsort(-row, kind="stable")]

    def belongs_to_none(self, picture: int) -> bool:
        return self.typicality is not None and bool(self.typicality[picture] < self.least_typical)


def check_labels(classes: Sequence[str], labels: np.ndarray, most: int) -> None:
    """Every class needs a labelled picture, there must be two classes, and not too many pictures."""
    if len(classes) < 2:
        raise BadValueError(f"there is one class only, '{classes[0]}': at least 2 are needed to choose from")
    missing = set(range(len(classes))) - set(labels.tolist())
    if missing:
        raise TridentError(f"class '{classes[min(missing)]}' has no labelled picture")
    if len(labels) > most:
        raise BadValueError(
            f"there are {len(labels)} labelled pictures: {most} at most fit into memory, so give fewer of each class"
        )
