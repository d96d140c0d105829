"""Golden numbers: what every row of the leaderboard answers to a few tasks of real images, the embedded letters."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore
from trident.leaderboard.measuring import Features, checkpoint_of, under_condition, with_features
from trident.leaderboard.rows import CONDITIONS, board_called, rows
from trident.measuring.evaluate import evaluate
from trident.recipes.loading import with_overrides
from trident.weights import weight_names

BOARD = board_called("glyphs")
MEASURED = [name for name, row in rows().items() if row.recipe or row.weights_on(BOARD) in weight_names()]
# PADDLE's published penalty is for hundreds of features. Of these 16 it makes one class of all queries.
SETTINGS = {"paddle": ["method.penalty=5"]}
# The mean probability of the true class over three tasks, in percent. It changes only if a method, its weights, or the
# drawing of tasks does.
GOLDEN = {
    "set": 93.30,
    "set-views": 93.30,
    "ensemble": 94.88,
    "simpleshot": 86.10,
    "protonet": 82.07,
    "protonet-batch": 81.85,
    "matching": 71.00,
    "relation-network": 76.31,
    "baseline": 79.45,
    "baseline-plus-plus": 77.44,
    "feat": 39.13,
    "feat-transductive": 35.41,
    "frn": 78.51,
    "assoc-align": 70.83,
    "nearest-mean": 73.60,
    "logistic-regression": 40.11,
    "nearest-neighbours": 90.67,
    "soft-kmeans": 88.20,
    "tim-gradient": 82.73,
    "tim-alternating": 96.42,
    "alpha-tim": 80.88,
    "laplacian-shot": 51.23,
    "pt-map": 97.92,
    "bms": 92.80,
    "bms-equal": 92.96,
    "entropy-min": 66.79,
    "k-reciprocal": 77.30,
    "bd-cspn": 87.25,
    "paddle": 24.74,
    "tpn": 83.51,
    "epnet": 45.26,
    "ssr": 94.79,
    "sib": 78.25,
    "simple-cnaps": 62.90,
    "transductive-cnaps": 55.28,
    "versa": 71.23,
    "dkt": 30.27,
    "ove-polya-gamma": 55.79,
    "ove-predictive": 76.41,
    "logistic-softmax-gp": 22.00,
    "logistic-softmax-predictive": 23.49,
    "metaqda": 76.43,
    "abpml": 71.94,
}


@cache
def glyphs() -> tuple[ImageStore, Features]:
    return open_glyphs(), Features("cpu")


@pytest.mark.parametrize("name", MEASURED)
def test_golden_probability_of_the_true_class(name: str) -> None:
    row, (store, features) = rows()[name], glyphs()
    checkpoint, seen = checkpoint_of(row, BOARD), store
    if row.recipe:
        checkpoint, seen = with_features(checkpoint, store, row, features)
    checkpoint = under_condition(checkpoint, row, CONDITIONS["balanced"])
    checkpoint = replace(checkpoint, recipe=with_overrides(checkpoint.recipe, SETTINGS.get(name, [])))
    found = evaluate(checkpoint, seen, split="test", tasks=3, seed=0)
    of_truth = np.take_along_axis(found.predictions.log_probabilities, found.predictions.labels[..., None], 2)
    assert 100 * np.exp(of_truth).mean() == pytest.approx(GOLDEN[name], abs=0.05)
    assert found.accuracy > 30, "20 % is chance"


def test_every_row_that_can_be_measured_has_a_golden_number() -> None:
    assert set(MEASURED) == set(GOLDEN)
