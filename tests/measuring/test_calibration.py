"""Calibration against independent implementations, and the temperature against a brute-force search."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from trident.measuring.calibration import calibration, fit_temperature, reliability
from trident.measuring.evaluate import Predictions


def predictions(logits: np.ndarray, labels: np.ndarray) -> Predictions:
    """(query, n_way) and (query,) as predictions of one task."""
    return Predictions(torch.log_softmax(torch.from_numpy(logits), -1).numpy()[None], labels[None])


def random_predictions(seed: int, n: int = 500, n_way: int = 5, sharpness: float = 2.0) -> Predictions:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, n_way, n)
    logits = generator.normal(0, sharpness, (n, n_way)) + 1.5 * np.eye(n_way)[labels]
    return predictions(logits, labels)


def assert_as_others_say(found: Predictions) -> None:
    ours = calibration(found)
    probabilities, labels = np.exp(found.log_probabilities[0]), found.labels[0]
    n_way = probabilities.shape[1]
    norms: tuple[tuple[Literal["l1", "max"], float], ...] = (("l1", ours.ece), ("max", ours.mce))
    for norm, value in norms:
        theirs = multiclass_calibration_error(
            torch.from_numpy(probabilities), torch.from_numpy(labels), num_classes=n_way, n_bins=10, norm=norm
        )
        assert value == pytest.approx(float(theirs), abs=1e-6)
    theirs = brier_score_loss(labels, probabilities, labels=range(n_way), scale_by_half=False)
    assert ours.brier == pytest.approx(theirs, abs=1e-6)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 300), st.integers(3, 8), st.floats(0.05, 20))
def test_as_torchmetrics_and_scikit_learn_say(seed: int, n: int, n_way: int, sharpness: float) -> None:
    found = random_predictions(seed, n, n_way, sharpness)
    # torchmetrics gives confidences that round to 1 in float32 an eleventh bin of their own: leave them out.
    kept = np.exp(found.log_probabilities[0]).max(1) < 1 - 1e-6
    if kept.any():
        assert_as_others_say(Predictions(found.log_probabilities[:, kept], found.labels[:, kept]))


def test_ties_and_empty_bins_as_others_say() -> None:
    # Confidences at the very edge of a bin, equal confidences, equal top classes, and seven bins with nothing in them.
    rows = [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]
    probabilities, labels = np.array(rows), np.array([0, 1, 2, 1, 0])
    with np.errstate(divide="ignore"):
        found = Predictions(np.log(probabilities)[None], labels[None])
    assert_as_others_say(found)
    bins = calibration(found).bins
    assert bins.count.tolist() == [0, 0, 0, 0, 0, 4, 0, 1, 0, 0]


def test_a_confidence_of_one_belongs_to_the_last_bin() -> None:
    probabilities = np.array([[1.0, 0.0], [0.95, 0.05], [1.0, 0.0]])
    bins = reliability(probabilities, np.array([0, 0, 1]))
    assert bins.count.tolist() == [0] * 9 + [3]
    assert bins.accuracy[9] == pytest.approx(2 / 3)
    assert bins.confidence[9] == pytest.approx(2.95 / 3)


def test_brier_score_by_hand() -> None:
    with np.errstate(divide="ignore"):
        found = Predictions(np.log(np.array([[[1.0, 0.0], [0.5, 0.5]]])), np.array([[1, 0]]))
    assert calibration(found).brier == pytest.approx((2.0 + 0.5) / 2)


@pytest.mark.parametrize("true_temperature", [0.3, 1.0, 4.0])
def test_the_temperature_makes_the_labels_most_likely(true_temperature: float) -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, (20_000, 5))
    chances = np.exp(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    labels = (chances.cumsum(1) > generator.random((len(logits), 1))).argmax(1)
    found = predictions(logits * true_temperature, labels)
    fitted = fit_temperature(found)
    assert fitted == pytest.approx(true_temperature, rel=0.05)

    def loss(temperature: float) -> float:
        scaled = torch.log_softmax(torch.from_numpy(found.log_probabilities[0] / temperature), -1)
        return float(torch.nn.functional.nll_loss(scaled, torch.from_numpy(labels)))

    assert loss(fitted) <= min(loss(fitted * factor) for factor in (0.9, 0.99, 1.01, 1.1)) + 1e-12
    assert calibration(found, fitted).ece < 0.02


def test_temperatures_of_perfect_useless_and_wrong_predictions() -> None:
    labels = np.arange(20) % 4
    for gap in (20.0, 2000.0, np.inf):  # the last: probabilities of exactly 0 and 1
        perfect = np.where(np.eye(4)[labels] > 0, 0.0, -gap)
        assert fit_temperature(Predictions(perfect[None], labels[None])) < 0.01
    useless = np.full((20, 4), math.log(0.25))
    assert fit_temperature(Predictions(useless[None], labels[None])) == 1
    wrong = np.where(np.eye(4)[(labels + 1) % 4] > 0, 0.0, -30.0)
    assert fit_temperature(Predictions(wrong[None], labels[None])) > 100


def test_temperature_changes_confidence_not_accuracy() -> None:
    found = random_predictions(5)
    plain, hot = calibration(found), calibration(found, 5.0, "paper", "somewhere")
    assert (found.log_probabilities / 5.0).argmax(-1).tolist() == found.log_probabilities.argmax(-1).tolist()
    assert hot.bins.confidence.max() < plain.bins.confidence.max()
    assert "very predictions that are scored" in hot.describe()
    assert hot.to_json()["fitted_on"] == "paper"
