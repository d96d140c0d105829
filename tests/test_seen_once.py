"""Features computed once for each image give the predictions that computing them in every task gives."""

from dataclasses import replace

import numpy as np
import pytest

from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.measuring import subject
from trident.measuring.evaluate import evaluate
from trident.measuring.seen_once import SeenImages, sees_images_apart
from trident.measuring.subject import TrainedModel, subject_of
from trident.settings import Protocol, Views

NAMES = ["glyphs-simpleshot", "glyphs-ensemble", "glyphs-relation-network", "glyphs-feat", "glyphs-protonet"]
RUNNING = Protocol(batch_norm="running")
AS_IT_IS = Views()


def under(name: str, protocol: Protocol, views: Views = AS_IT_IS) -> Checkpoint:
    checkpoint = load_checkpoint(name)
    return replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=protocol, views=views))


def log_probabilities(model: Checkpoint, store: ImageStore) -> np.ndarray:
    return evaluate(model, store, split="test", tasks=3, seed=7).predictions.log_probabilities


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("protocol", "views"),
    [
        (RUNNING, AS_IT_IS),
        (replace(RUNNING, balance="dirichlet"), Views(mirrored=True)),
        (replace(RUNNING, queries_at_once="one"), Views(mirrored=True, corners=True)),
    ],
)
def test_predictions_are_the_same(name: str, protocol: Protocol, views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = under(name, protocol, views), open_glyphs()
    once = log_probabilities(model, store)
    monkeypatch.setattr(subject, "sees_images_apart", lambda *_: False)
    np.testing.assert_allclose(np.exp(once), np.exp(log_probabilities(model, store)), atol=1e-4)


def test_an_image_is_computed_when_it_is_first_asked_for_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    features = SeenImages._computed

    def counted(self: SeenImages, images: np.ndarray) -> np.ndarray:
        computed.append(len(images))
        return features(self, images)

    monkeypatch.setattr(SeenImages, "_computed", counted)
    model, store = under("glyphs-simpleshot", RUNNING), open_glyphs()
    found = subject_of(model)
    assert isinstance(found, TrainedModel)
    source = found.prepare(store, "test", 0, "cpu", "auto", "auto", None).source
    positions = np.array([[5, 900, 5], [31, 900, 40]])
    first = source.images.at(positions)
    assert first.shape[:2] == (2, 3) and sum(computed) == 4
    assert (source.images.at(positions) == first).all() and sum(computed) == 4
    assert (first[0, 0] == first[0, 2]).all() and not (first[0, 0] == first[1, 0]).all()


def test_images_that_change_each_others_features_are_computed_in_every_task() -> None:
    for name, protocol in [
        ("glyphs-simpleshot", Protocol(batch_norm="transductive")),
        ("glyphs-simpleshot", Protocol(batch_norm="support")),
        ("glyphs-set", RUNNING),  # TRIDENT's own networks see the task
    ]:
        found = subject_of(under(name, protocol))
        assert isinstance(found, TrainedModel)
        prepared = found.prepare(open_glyphs(), "test", 0, "cpu", "auto", "auto", None)
        assert not sees_images_apart(found.recipe, prepared.execution)
        assert not isinstance(prepared.source.images, SeenImages)
