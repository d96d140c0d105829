"""scikit-learn's own checks of `TridentClassifier`: all that hold for pictures, and why the others do not."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from stand_in_backbone import NAME
from tiny import TINY_RECIPE
from trident.labelling.classifier import TridentClassifier
from trident.labelling.labelled import Labelled
from trident.learning.checkpoint import Checkpoint, save_checkpoint
from trident.methods.metric.protonet import ProtoNet

checks = pytest.importorskip("sklearn.utils.estimator_checks")

# Why, and what each of them stops at: all that it asks before that holds. docs/classifier.md gives the reasons too.
NOT_FOR_PICTURES = {
    "check_classifiers_train": (
        "at its end wants an error for rows of another length; pictures may have any size",
        "the number of features in predict is different",
    ),
    "check_dtype_object": (
        "an array of objects is a list of pictures or of paths, not a table of numbers",
        "image 0 is an array of shape",
    ),
    "check_estimators_empty_data_messages": (
        "at its end wants a message about 0 features; a picture without pixels is named instead",
        "image 0 is an array of shape .* it must have a height",
    ),
    "check_fit2d_predict1d": (
        "wants the words 'Reshape your data'; the error says which shapes will do",
        "images are an array of shape",
    ),
    "check_fit_score_takes_y": ("fit_predict takes a third argument, the pile", "missing .* 'queries'"),
    "check_n_features_in": ("pictures may have any size, so there is no number of features to keep to", "^$"),
    "check_n_features_in_after_fitting": (
        "pictures may have any size, so there is no number of features to keep to",
        "does not set the `n_features_in_` attribute",
    ),
}
WEIGHTS = "untrained.safetensors"
PIXELS = 8  # each number becomes a square of so many pixels' side


def as_pictures(rows: Any) -> Any:
    """Rows of numbers as grey pictures of squares; what is not a table of numbers is left to the classifier."""
    table = rows if hasattr(rows, "toarray") else np.asarray(rows)
    if table.ndim != 2 or table.dtype.kind not in "fiuc" or hasattr(rows, "toarray"):
        return rows
    side = math.ceil(math.sqrt(table.shape[1]))
    squares = np.zeros((len(table), side * side), complex if np.iscomplexobj(table) else float)
    squares[:, : table.shape[1]] = table
    finer = squares.copy()
    if not np.iscomplexobj(table):
        finite = np.isfinite(squares)
        squares[finite] = (squares[finite] / 10 + 0.5) % 1  # between 0 and 1, as a picture must be
        finer[finite] = squares[finite] * 255 % 1
    pictures = squares.reshape(len(table), side, side, 1).repeat(PIXELS, 1).repeat(PIXELS, 2)
    pictures[:, ::PIXELS, ::PIXELS, 0] = finer.reshape(len(table), side, side)  # so that no two rows look the same
    return pictures


class OfRows(TridentClassifier):
    """The classifier, handed tables: the only thing scikit-learn's checks have to give."""

    def __init__(self, weights: str = WEIGHTS, device: str = "cpu"):
        super().__init__(weights, device, backbone="conv4")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = True, False, False
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        return super().fit(as_pictures(X), y)

    def _labelled(self, images: Any, together: bool) -> Labelled:
        return super()._labelled(as_pictures(images), together)


class OfRowsByFeatures(OfRows):
    """The same with a frozen backbone."""

    def __init__(self, backbone: str = NAME, device: str = "cpu", cache: bool = False):
        super().__init__("auto", device)
        self.backbone, self.cache = backbone, cache


def name_of(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


ALL = [(kind, check) for kind in (OfRows, OfRowsByFeatures) for _, check in checks.estimator_checks_generator(kind())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a network too small to be slow. It is not trained: this seed happens to tell scikit-learn's blobs apart."""
    recipe = replace(TINY_RECIPE, method=ProtoNet())
    where = tmp_path_factory.mktemp("weights")
    save_checkpoint(where / WEIGHTS, Checkpoint(recipe, recipe.initial(2), recipe.model.initial_running(), 0))
    return where


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "check"), ALL, ids=[f"{place}-{kind.__name__}-{name_of(check)}" for place, (kind, check) in enumerate(ALL)]
)
def test_check(kind: type[OfRows], check: Callable[..., None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if name_of(check) not in NOT_FOR_PICTURES:
        check(kind())
        return
    stops_at = NOT_FOR_PICTURES[name_of(check)][1]
    with pytest.raises((AssertionError, TypeError, ValueError), match=stops_at):  # else its reason has gone stale
        check(kind())


def test_the_list_of_what_is_not_for_pictures_is_current_and_told() -> None:
    assert set(NOT_FOR_PICTURES) <= {name_of(check) for _, check in ALL}
    told = (Path(__file__).parents[2] / "docs" / "classifier.md").read_text(encoding="utf-8")
    for name, (reason, _) in NOT_FOR_PICTURES.items():
        assert f"| `{name}` | {reason} |" in told
    listed = [line for line in told.splitlines() if line.startswith("| `check_")]
    assert len(listed) == len(NOT_FOR_PICTURES)
