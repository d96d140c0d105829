"""Features computed once for each image give the predictions that computing them in every task gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stores import write_store
from trident.backbones.conv4 import Conv4Backbone
from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore, open_store
from trident.engines.execution import Execution
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.measuring import subject
from trident.measuring.audit import audit
from trident.measuring.evaluate import evaluate
from trident.measuring.subject import CachedFeatures, can_be_cached, subject_of
from trident.settings import Protocol, Views
from trident.tasks.images import Images

NAMES = ["glyphs-simpleshot", "glyphs-ensemble", "glyphs-relation-network", "glyphs-feat", "glyphs-protonet"]
RUNNING = Protocol(batch_norm="running")
AS_IT_IS = Views()
GLYPHS = open_glyphs()


def under(name: str, protocol: Protocol, views: Views = AS_IT_IS) -> Checkpoint:
    checkpoint = load_checkpoint(name)
    return replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=protocol, views=views))


def log_probabilities(model: Checkpoint, store: ImageStore) -> np.ndarray:
    return evaluate(model, store, split="test", tasks=3, seed=7).predictions.log_probabilities


def images_of(model: Checkpoint, store: ImageStore = GLYPHS) -> Images:
    """Those that its tasks are drawn from."""
    return subject_of(model).prepare(store, {"split": "test", "tasks": 1, "seed": 0}).source.images


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("protocol", "views"),
    [
        (RUNNING, AS_IT_IS),
        (replace(RUNNING, balance="dirichlet"), Views(mirrored=True)),
        (replace(RUNNING, queries_at_once="one"), Views(mirrored=True, corners=True)),
        (RUNNING, Views(mirrored=True, shifted=True, average="features")),
        (replace(RUNNING, queries_at_once="one"), Views(shifted=True, average="features")),
    ],
)
def test_predictions_are_the_same(name: str, protocol: Protocol, views: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = under(name, protocol, views), GLYPHS
    once = log_probabilities(model, store)
    assert isinstance(images_of(model), CachedFeatures)
    monkeypatch.setattr(subject, "can_be_cached", lambda *_: False)
    assert not isinstance(images_of(model), CachedFeatures)
    np.testing.assert_allclose(np.exp(once), np.exp(log_probabilities(model, store)), atol=1e-4)


def test_an_image_is_computed_when_it_is_first_asked_for_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    features = CachedFeatures._computed

    def counted(self: CachedFeatures, images: np.ndarray) -> np.ndarray:
        computed.append(len(images))
        return features(self, images)

    monkeypatch.setattr(CachedFeatures, "_computed", counted)
    images = images_of(under("glyphs-simpleshot", RUNNING))
    start = GLYPHS.classes_of("test")[0].start
    positions = start + np.array([[5, 100, 5], [31, 100, 40]])
    found = images.at(positions)
    assert found.shape[:2] == (2, 3) and sum(computed) == 4
    assert (images.at(positions) == found).all() and sum(computed) == 4
    assert (found[0, 0] == found[0, 2]).all() and not (found[0, 0] == found[1, 0]).all()
    with pytest.raises(IndexError):
        images.at(np.array([GLYPHS.classes_of("train")[0].start]))


def test_images_that_change_each_others_features_are_computed_in_every_task() -> None:
    for name, protocol in [
        ("glyphs-simpleshot", Protocol(batch_norm="transductive")),
        ("glyphs-simpleshot", Protocol(batch_norm="support")),
        ("glyphs-set", RUNNING),  # TRIDENT's own networks see the task
    ]:
        assert not isinstance(images_of(under(name, protocol)), CachedFeatures)


def test_features_are_not_kept_on_a_gpu_or_of_too_many_images_or_by_another_backbone() -> None:
    class Another(Conv4Backbone):
        pass

    recipe = under("glyphs-simpleshot", RUNNING).recipe
    assert can_be_cached(recipe, Execution("cpu"), 10_000)
    assert not can_be_cached(recipe, Execution("cuda"), 10_000)
    assert not can_be_cached(recipe, Execution("cpu"), 100_000_000)
    assert not can_be_cached(replace(recipe, backbone=Another(**vars(recipe.backbone))), Execution("cpu"), 10_000)


def test_features_that_are_not_finite_cost_an_audit_one_line() -> None:
    model = under("glyphs-protonet", Protocol())
    damaged = {key: torch.full_like(value, torch.nan) for key, value in model.running.items()}
    found = audit(replace(model, running=damaged), GLYPHS, split="test", tasks=2, seed=0)
    assert "running batch norm" in found.without_result and len(found.rows) > 3


def test_damaged_images_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "damaged.store"
    write_store(path, "glyphs", GLYPHS.classes, GLYPHS.images)
    with path.open("r+b") as file:
        file.seek(-len(GLYPHS.images) // 4, 2)  # in an image of the test classes, which come last
        file.write(b"damaged")
    with pytest.raises(TridentError, match="damaged"):
        log_probabilities(under("glyphs-simpleshot", RUNNING), open_store(path))


def test_weights_in_training_can_be_measured() -> None:
    model = under("glyphs-simpleshot", RUNNING)
    learning = {key: value.clone().requires_grad_() for key, value in model.parameters.items()}
    np.testing.assert_array_equal(
        log_probabilities(replace(model, parameters=learning), GLYPHS), log_probabilities(model, GLYPHS)
    )
