"""`TridentClassifier`: what it takes, what it promises, and its scikit-learn manners. Real weights throughout."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from test_predict import COLOURS, WEIGHTS, picture

from trident.errors import TridentError
from trident.labelling.classifier import TridentClassifier

NAMES = sorted(COLOURS)


def pictures(n: int, first: int = 0, size: tuple[int, int] = (84, 84)) -> tuple[list[Image.Image], list[str]]:
    labels = [NAMES[place % 3] for place in range(n)]
    return [picture(label, first + place, size) for place, label in enumerate(labels)], labels


@pytest.fixture(scope="module")
def fitted() -> TridentClassifier:
    return TridentClassifier(WEIGHTS).fit(*pictures(7))


def test_it_labels(fitted: TridentClassifier) -> None:
    queries, truth = pictures(12, first=50)
    assert list(fitted.classes_) == NAMES
    probabilities = fitted.predict_proba(queries)
    assert probabilities.shape == (12, 3)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (fitted.predict(queries) == fitted.classes_[probabilities.argmax(1)]).all()
    assert fitted.score(queries, truth) > 0.8
    together = TridentClassifier(WEIGHTS).fit_predict(*pictures(7), queries)
    assert (together == truth).mean() > 0.8


def test_alone_means_alone_and_together_means_together(fitted: TridentClassifier) -> None:
    queries, _ = pictures(4, first=50)
    for_all = fitted.predict_proba(queries)
    np.testing.assert_allclose(fitted.predict_proba(queries[::-1])[::-1], for_all, atol=1e-6)
    np.testing.assert_allclose(fitted.predict_proba(queries[1:2]), for_all[1:2], atol=1e-6)
    pile = fitted.transduce_proba(queries)
    np.testing.assert_allclose(fitted.transduce_proba(queries[::-1])[::-1], pile, atol=1e-4)
    assert not np.allclose(fitted.transduce_proba(queries[1:2]), pile[1:2], atol=1e-4)


def test_all_forms_of_images_say_the_same(fitted: TridentClassifier, tmp_path: Path) -> None:
    queries, _ = pictures(3, first=20)
    for place, image in enumerate(queries):
        image.save(tmp_path / f"{place}.png")
    array = np.stack([np.asarray(image) for image in queries])  # NHWC, uint8
    forms = {
        "PIL images": queries,
        "paths": [tmp_path / f"{place}.png" for place in range(3)],
        "strings": [str(tmp_path / f"{place}.png") for place in range(3)],
        "one array": array,
        "arrays": list(array),
        "channels first": np.moveaxis(array, 3, 1),
        "floating point": array / 255,
        "float32 tensor, channels first": torch.from_numpy(array).permute(0, 3, 1, 2).float() / 255,
        "tensors": list(torch.from_numpy(array)),
        "an array of paths": np.array([str(tmp_path / f"{place}.png") for place in range(3)]),
        "some of each": [queries[0], array[1], tmp_path / "2.png"],
    }
    expected = fitted.transduce_proba(queries)
    for name, form in forms.items():
        np.testing.assert_allclose(fitted.transduce_proba(form), expected, atol=1e-6, err_msg=name)


def test_any_size_labels_of_any_kind_and_unequal_shots() -> None:
    images, _ = pictures(4, size=(200, 90))
    grey = [np.asarray(image.convert("L")) for image in images]
    model = TridentClassifier(WEIGHTS).fit(grey, [10, 2, 2, 2])
    assert list(model.classes_) == [2, 10]
    assert set(model.predict(grey)) <= {2, 10}
    with_alpha = [image.convert("RGBA") for image in images]
    assert TridentClassifier(WEIGHTS).fit(with_alpha, list("abcb")).predict(with_alpha[:1]).shape == (1,)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((4, 10)), [0, 1, 0, 1], r"array of shape \(4, 10\)"),
        (np.zeros((2, 7, 9, 5)), [0, 1], "1, 3 or 4 channels are expected"),
        (np.full((2, 9, 9, 3), 200.0), [0, 1], "image 0 has values outside 0 to 1"),
        (np.zeros((2, 9, 9, 3), np.int64), [0, 1], "image 0 is of int64"),
        (np.zeros((2, 9, 9, 3)), [0, 1, 2], r"2 images came with labels of shape \(3,\)"),
        (np.zeros((2, 9, 9, 3)), [0, 0], "there is one class only, '0'"),
        ([], [], "no images to learn from"),
        (np.zeros((9, 9, 3)), [0], r"a single one: give images\[None\]"),
        ("cat.jpg", ["cat"], "a single one: give a list"),
        (["nowhere.jpg", "nowhere.png"], [0, 1], r"nowhere.jpg: No such file"),
    ],
)
def test_bad_input_is_one_clear_error(images: object, labels: object, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        TridentClassifier(WEIGHTS).fit(images, labels)


def test_manners(fitted: TridentClassifier) -> None:
    with pytest.raises(NotFittedError):
        TridentClassifier().predict(pictures(1)[0])
    assert clone(fitted).get_params() == {"weights": WEIGHTS, "device": "auto", "backbone": "auto", "cache": True}
    assert TridentClassifier().set_params(device="cpu").device == "cpu"
    queries, _ = pictures(2, first=30)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(queries), fitted.predict_proba(queries))


def test_in_a_pipeline_and_under_cross_validation() -> None:
    images, labels = pictures(12)
    array = np.stack([np.asarray(image) for image in images])
    darker = FunctionTransformer(lambda x: (x * 0.9).astype(np.uint8))
    pipeline = Pipeline([("darker", darker), ("labels", TridentClassifier(WEIGHTS))])
    assert cross_val_score(pipeline, array, np.array(labels), cv=2, error_score="raise").mean() > 0.6


def test_a_fit_that_fails_changes_nothing() -> None:
    model = TridentClassifier(WEIGHTS).fit(*pictures(7))
    queries, _ = pictures(3, first=50)
    before = model.predict(queries)
    with pytest.raises(TridentError):
        model.fit(["nowhere.jpg"] * 4, ["x", "x", "y", "y"])
    assert (model.predict(queries) == before).all()


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ValueError, match=f"{device}"):
        TridentClassifier(WEIGHTS, device).fit(*pictures(6))
