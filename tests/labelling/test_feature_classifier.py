"""`TridentClassifier` on pretrained features."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from stand_in_backbone import COLOURS, NAME, picture
from trident.backbones import torch_module
from trident.errors import BadValueError, TridentError
from trident.labelling.classifier import TridentClassifier
from trident.labelling.feature_labeller import FeatureLabeller

SIZE = 64  # of made-up features


def fitted(**options: Any) -> TridentClassifier:
    names = [*COLOURS] * 2
    model = TridentClassifier(backbone=NAME, **options)
    return model.fit([picture(name, place) for place, name in enumerate(names)], names)


def queries(n: int = 5) -> tuple[list[Any], list[str]]:
    names = [*COLOURS] * n
    return [picture(name, 100 + place) for place, name in enumerate(names)], names


def test_the_classifier_pickles_and_clones() -> None:
    model = fitted()
    pictures, names = queries()
    assert list(model.predict(pictures)) == names
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.transduce_proba(pictures), model.transduce_proba(pictures))
    np.testing.assert_array_equal(again.predict_proba(pictures), model.predict_proba(pictures))
    assert len(pickle.dumps(model)) < 50_000  # without the network
    cloned = clone(model)
    assert cloned.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        cloned.predict(pictures)


def test_the_classifier_says_what_belongs_to_none() -> None:
    model = fitted()
    pictures, _ = queries()
    assert not model.none_of_these(pictures).any()
    white = [np.full((20, 20, 3), level, np.uint8) for level in (230, 255)]
    assert list(model.none_of_these([*pictures, *white])) == [False] * len(pictures) + [True] * 2
    lone = TridentClassifier(backbone=NAME).fit([picture(name, 0) for name in COLOURS], [*COLOURS])
    with pytest.raises(BadValueError, match="at least 5 pictures"):
        lone.none_of_these(pictures[:1])
    conv4 = TridentClassifier(backbone="conv4").fit([picture(name, 0) for name in COLOURS], [*COLOURS])
    for ask in (conv4.none_of_these, conv4.suggest):
        with pytest.raises(BadValueError, match="another backbone than conv4"):
            ask(pictures[:1])


def test_the_classifier_in_threads() -> None:
    model = fitted()
    pictures, _ = queries()
    expected, found = model.transduce_proba(pictures), {}

    def work(place: int) -> None:
        found[place] = model.transduce_proba(pictures)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in found.values():
        np.testing.assert_array_equal(one, expected)


def test_the_default_classifier_uses_pretrained_features_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["red", "blue"]
    pictures = [picture(name, 0) for name in names]
    labeller = TridentClassifier(device="cpu").fit(pictures, names).labeller_
    assert isinstance(labeller, FeatureLabeller)
    assert labeller.backbone.name == "efficientnet-lite0"
    assert labeller.cache is not None and labeller.cache.size()[0] >= 2
    with monkeypatch.context() as patch:  # with cached features the network is not even made
        patch.setattr(torch_module, "_compiled", None)
        again = TridentClassifier(device="cpu").fit(pictures, names).labeller_
        assert isinstance(again, FeatureLabeller)
        np.testing.assert_array_equal(again.features, labeller.features)
    without = TridentClassifier(backbone=NAME, cache=False).fit(pictures, names).labeller_
    assert isinstance(without, FeatureLabeller) and without.cache is None
    with pytest.raises(TridentError, match="have a backbone of their own"):
        TridentClassifier("mini-5w1s-set", backbone=NAME).fit(pictures, names)
