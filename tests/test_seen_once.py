"""Features computed once for each image give the predictions that computing them in every task gives."""

from dataclasses import replace

import numpy as np
import pytest

from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.measuring import seen_once, subject
from trident.measuring.evaluate import evaluate
from trident.measuring.seen_once import SeenImages
from trident.measuring.subject import subject_of
from trident.settings import Protocol, Views
from trident.tasks.images import Images

NAMES = ["glyphs-simpleshot", "glyphs-ensemble", "glyphs-relation-network", "glyphs-feat", "glyphs-protonet"]
RUNNING = Protocol(batch_norm="running")
AS_IT_IS = Views()


def under(name: str, protocol: Protocol, views: Views = AS_IT_IS) -> Checkpoint:
    checkpoint = load_checkpoint(name)
    return replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=protocol, views=views))


def log_probabilities(model: Checkpoint, store: ImageStore) -> np.ndarray:
    return evaluate(model, store, split="test", tasks=3, seed=7).predictions.log_probabilities


def images_of(name: str, protocol: Protocol) -> Images:
    """Those that its tasks are drawn from."""
    found = subject_of(under(name, protocol))
    return found.prepare(open_glyphs(), "test", 0, "cpu", "auto", "auto", None).source.images


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
    monkeypatch.setattr(seen_once, "_latest", {})
    first, again = (images_of("glyphs-simpleshot", RUNNING) for _ in range(2))
    positions = np.array([[5, 900, 5], [31, 900, 40]])
    found = first.at(positions)
    assert found.shape[:2] == (2, 3) and sum(computed) == 4
    assert (again.at(positions) == found).all() and sum(computed) == 4
    assert (found[0, 0] == found[0, 2]).all() and not (found[0, 0] == found[1, 0]).all()
    other = images_of("glyphs-ensemble", RUNNING)
    assert other.at(positions).shape != found.shape and sum(computed) == 8


def test_images_that_change_each_others_features_are_computed_in_every_task() -> None:
    for name, protocol in [
        ("glyphs-simpleshot", Protocol(batch_norm="transductive")),
        ("glyphs-simpleshot", Protocol(batch_norm="support")),
        ("glyphs-set", RUNNING),  # TRIDENT's own networks see the task
    ]:
        assert not isinstance(images_of(name, protocol), SeenImages)
