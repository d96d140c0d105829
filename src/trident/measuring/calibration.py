"""Calibration: how far confidences can be trusted. ECE, MCE, Brier score and temperature scaling.

A prediction's confidence is the probability of its most likely class. Predictions are sorted into ten equal-width bins
of confidence [0, 0.1), [0.1, 0.2), ... [0.9, 1]; in each, mean confidence should equal accuracy.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, Unpack

import numpy as np

from trident.data.store import ImageStore
from trident.measuring.evaluate import Evaluation, Predictions, evaluate
from trident.measuring.record import CalibrationFigures
from trident.measuring.subject import Measurable, Sample, subject_of
from trident.progress import Progress
from trident.tasks.episodes import EpisodeSampler

BINS = 10
FittedOn = Literal["none", "validation", "paper"]
FITTED_ON = {
    "none": "no temperature",
    "validation": "fitted on validation tasks",
    "paper": "fitted on the very predictions that are scored, as the paper's released code does",
}
_COLDEST, _HOTTEST = 1e-3, 1e3
_LEAST = -1e4  # replaces log(0) if float32 rounded a probability to 0


@dataclass(frozen=True)
class ReliabilityBins:
    """The values of a reliability diagram. Empty bins hold zeros."""

    confidence: np.ndarray  # (bin,) mean
    accuracy: np.ndarray  # (bin,)
    count: np.ndarray  # (bin,) int64


@dataclass(frozen=True)
class Calibration:
    """Calibration of some predictions at one temperature, over all queries of all tasks."""

    ece: float  # mean gap between confidence and accuracy, weighted by the bins' counts
    mce: float  # largest gap of any bin that is not empty
    brier: float  # mean over queries of the summed squared error of the probabilities: 0 to 2
    temperature: float
    fitted_on: FittedOn
    fitted_tasks: str  # what the temperature was fitted on, in words; empty for no temperature
    bins: ReliabilityBins

    def describe(self) -> str:
        if self.fitted_on == "none":
            return "no temperature"
        tasks = f" ({self.fitted_tasks})" if self.fitted_tasks else ""
        return f"temperature {self.temperature:.3f}, {FITTED_ON[self.fitted_on]}{tasks}"

    def figures(self) -> CalibrationFigures:
        """What records keep of it."""
        return CalibrationFigures(self.ece, self.temperature, self.mce, self.brier)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bins": {key: value.tolist() for key, value in asdict(self.bins).items()}}


@dataclass(frozen=True)
class CalibrationResult:
    """A model's calibration without and with the requested temperature."""

    evaluation: Evaluation
    plain: Calibration
    scaled: Calibration | None

    def panels(self) -> list[tuple[str, Calibration]]:
        plain = [("no temperature", self.plain)]
        if self.scaled is None:
            return plain
        titles = {"validation": "fitted on validation", "paper": "fitted on these very predictions"}
        return [*plain, (f"T = {self.scaled.temperature:.2f}, {titles[self.scaled.fitted_on]}", self.scaled)]

    def to_json(self) -> dict[str, Any]:
        scaled = None if self.scaled is None else self.scaled.to_json()
        return {**self.evaluation.to_json(), "calibration": self.plain.to_json(), "with_temperature": scaled}


def calibrate(
    model: Measurable,
    store: ImageStore,
    temperature: FittedOn,
    fitting_store: ImageStore | None = None,
    fitting_tasks: int = 200,
    progress: Progress | None = None,
    **sample: Unpack[Sample],
) -> CalibrationResult:
    """Calibration over some tasks. A `validation` temperature is fitted on validation tasks of `fitting_store`."""
    subject, fitting_store = subject_of(model), fitting_store or store
    in_all = sample["tasks"] + (fitting_tasks if temperature == "validation" else 0)

    def progress_after(before: int) -> Progress | None:
        return progress and (lambda done, _: progress(before + done, in_all))

    if temperature == "validation":  # fail early if the store has no validation classes
        EpisodeSampler(fitting_store, "val", subject.episode, subject.protocol)
    evaluation = evaluate(subject, store, progress=progress_after(0), **sample)
    plain = calibration(evaluation.predictions)
    if temperature == "none":
        return CalibrationResult(evaluation, plain, None)
    fitted = evaluation
    if temperature == "validation":
        own = "temperature" if sample["split"] == "val" else None  # never the very tasks that are scored
        fitting: Sample = {**sample, "split": "val", "tasks": fitting_tasks}
        fitted = evaluate(subject, fitting_store, progress=progress_after(sample["tasks"]), stream=own, **fitting)
    value = fit_temperature(fitted.predictions)
    same = temperature == "validation" and (fitted.fingerprint, "val") == (evaluation.fingerprint, evaluation.split)
    kind = "other tasks of the classes that are scored" if same else "tasks"
    where = f"{fitted.dataset} {fitted.split}, {fitted.tasks} {kind}, seed {fitted.seed}"
    return CalibrationResult(evaluation, plain, calibration(evaluation.predictions, value, temperature, where))


def calibration(
    predictions: Predictions, temperature: float = 1.0, fitted_on: FittedOn = "none", fitted_tasks: str = ""
) -> Calibration:
    log_p, labels = _flat(predictions)
    probabilities = softmax(log_p / temperature)
    bins = reliability(probabilities, labels)
    gap = np.abs(bins.confidence - bins.accuracy)
    ece = float((gap * bins.count).sum() / bins.count.sum())
    brier = float(np.square(probabilities - np.eye(probabilities.shape[1])[labels]).sum(1).mean())
    return Calibration(ece, float(gap.max()), brier, temperature, fitted_on, fitted_tasks, bins)


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> ReliabilityBins:
    """The reliability diagram of probabilities (query, n_way) with labels (query,)."""
    confidence, hit = probabilities.max(1), probabilities.argmax(1) == labels
    place = np.minimum(np.digitize(confidence, np.arange(BINS + 1) / BINS) - 1, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    confidence, accuracy = (np.bincount(place, values, BINS) / np.maximum(count, 1) for values in (confidence, hit))
    return ReliabilityBins(confidence, accuracy, count)


def fit_temperature(predictions: Predictions) -> float:
    """The temperature that makes the labels most likely.

    The log-likelihood of softmax(b * log p) is concave in the inverse temperature b, so bisection finds where its slope
    is zero. If all predictions are right, the result is the coldest temperature allowed; if the true classes have, on
    average, a smaller log-probability than the mean over the classes, it is the hottest.
    """
    log_p, labels = _flat(predictions)
    behind = log_p[np.arange(len(labels)), labels][:, None] - log_p  # (query, n_way): 0 for the true class

    def slope(inverse: float) -> float:
        return float((softmax(inverse * log_p) * behind).sum(1).mean())

    if not behind.any():
        return 1.0  # uniform predictions: a temperature has no effect
    low, high = np.log(1 / _HOTTEST), np.log(1 / _COLDEST)
    for _ in range(60):
        midpoint = (low + high) / 2
        low, high = (midpoint, high) if slope(np.exp(midpoint)) >= 0 else (low, midpoint)
    return float(np.exp(-(low + high) / 2))


def _flat(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities (query, n_way) without infinities, and labels (query,)."""
    log_p = predictions.log_probabilities.reshape(-1, predictions.log_probabilities.shape[-1])
    return np.maximum(log_p, _LEAST), predictions.labels.reshape(-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))
