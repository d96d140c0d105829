"""Predictions by short cuts against the plain way: an image is encoded no more often than it must be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import trident.nn.conv4 as conv4
from conftest import TINY_RECIPE, tiny_store
from trident.engines.execution import make_model
from trident.learning.inner_loop import Learner
from trident.measuring.evaluate import Setup, set_up
from trident.measuring.prediction import alone, encode_support, predict, predict_one_by_one
from trident.methods.trident.network import Encodings
from trident.settings import Views

ALL = Views(mirrored=True, corners=True)

WAYS = [
    {"attfex": "set", "attfex_pooling": "classes"},
    {"attfex": "set", "attfex_pooling": "seeds"},
    {"attfex": "set", "attfex_pooling": "moments"},
    {"attfex": "off", "classifier_features": "unit"},
    {"attfex": "off", "classifier_start": "learned"},
    {"attfex": "positional"},
    {"method": "protonet"},
]
ways = pytest.mark.parametrize("model", WAYS, ids=lambda model: "-".join(map(str, model.values())))


def of(model: dict[str, Any], batch_norm: str, latents: str = "average", **adaptation: Any) -> Setup:
    """Untrained weights with random statistics, and tasks with several draws of noise."""
    usual: dict[str, Any] = {"classifier_start": "prototypes", "log_var_bound": 1.0}
    changed = replace(TINY_RECIPE.model, **(usual | model))
    protocol = replace(TINY_RECIPE.protocol, batch_norm=batch_norm, latents=latents, latent_samples=3)  # type: ignore[arg-type]
    if changed.method == "protonet" or changed.classifier_start == "learned":
        adaptation |= {"refinements": 0}  # it has no prototypes to refine
    own = replace(TINY_RECIPE.adaptation, **({"steps": 0} | adaptation))
    recipe = replace(TINY_RECIPE, model=changed, protocol=protocol, adaptation=own)
    network, generator = make_model(recipe), torch.Generator().manual_seed(4)
    shapes = {key: value.shape for key, value in network.initial_running().items()}
    running = {key: 0.02 + 0.1 * torch.rand(shape, generator=generator) for key, shape in shapes.items()}
    return set_up(recipe, network.initial(3), running, tiny_store(), split="test", seed=1)


@ways
@pytest.mark.parametrize("refinements", [0, 2])
@pytest.mark.parametrize("batch_norm", ["running", "transductive"])
def test_queries_one_by_one_are_tasks_of_one_query(model: dict[str, Any], batch_norm: str, refinements: int) -> None:
    learner, parameters, source = of(model, batch_norm, refinements=refinements)
    tasks = source.batch(range(2))
    found = predict_one_by_one(learner, parameters, tasks, at_once=4, views=ALL)
    near = 0.01 * float(found.std(1).mean())  # little, against how far untrained weights tell queries apart
    assert near > 3e-6
    fill = learner.model.settings.positional
    for task in range(2):
        for query in range(tasks.query_labels.shape[1]):
            expected = predict(learner, parameters, alone(tasks, task, [query], fill), views=ALL)[0, 0]
            torch.testing.assert_close(found[task, query], expected, rtol=0, atol=near)


@ways
@pytest.mark.parametrize("batch_norm", ["running", "transductive"])
def test_a_support_set_encoded_before_changes_nothing(model: dict[str, Any], batch_norm: str) -> None:
    learner, parameters, source = of(model, batch_norm, refinements=1)
    tasks = source.batch([3])
    support = encode_support(learner, parameters, tasks.images, ALL)
    settings = learner.model.settings
    by_itself = batch_norm == "running" and isinstance(learner, Learner) and not settings.positional
    assert (support is not None) == by_itself
    expected = predict_one_by_one(learner, parameters, tasks, 4, ALL)
    torch.testing.assert_close(predict_one_by_one(learner, parameters, tasks, 4, ALL, support), expected)
    if support is not None and settings.classifier_start == "prototypes":
        # It is what is gone by.
        other = [Encodings(*(x.flip(1) for x in encodings if x is not None)) for encodings in support]
        changed = predict_one_by_one(learner, parameters, tasks, 4, ALL, other)
        assert not torch.allclose(changed, expected, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("batch_norm", ["running", "transductive", "support"])
@pytest.mark.parametrize("model", WAYS[:-1], ids=lambda model: "-".join(map(str, model.values())))
def test_predictions_are_what_the_adapted_network_says(model: dict[str, Any], batch_norm: str, steps: int) -> None:
    learner, parameters, source = of(model, batch_norm, steps=steps, refinements=1)
    assert isinstance(learner, Learner)
    tasks = source.batch(range(2))
    adapted, _ = learner.adapt(parameters, tasks)[-1]
    with torch.no_grad():
        draws = [
            learner.model(adapted, tasks.images, "query", noise, learner.statistics()).logits
            for noise in tasks.query_noise
        ]
    mean = torch.stack([torch.softmax(logits, -1) for logits in draws]).mean(0)
    assert len(draws) == 3
    near = 0.01 * float(mean.std(1).mean())
    torch.testing.assert_close(predict(learner, parameters, tasks).exp(), mean, rtol=0, atol=near)


def images_encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"label_encoder": 0, "semantic_encoder": 0}
    encode = conv4.Conv4.__call__

    def counted(encoder: conv4.Conv4, parameters: Any, images: torch.Tensor, statistics: Any) -> torch.Tensor:
        counts[encoder.name] += images.shape[0] * images.shape[1]
        return encode(encoder, parameters, images, statistics)

    monkeypatch.setattr(conv4.Conv4, "__call__", counted)
    return counts


def test_each_image_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"attfex": "set"}
    learner, parameters, source = of(model, "running")
    tasks, n_images = source.batch(range(1)), TINY_RECIPE.episode.n_images
    counts = images_encoded(monkeypatch)
    predict_one_by_one(learner, parameters, tasks, at_once=2)
    assert counts == {"label_encoder": n_images, "semantic_encoder": n_images}
    learner, parameters, source = of(model, "transductive", latents="mean")
    counts = images_encoded(monkeypatch)
    predict(learner, parameters, source.batch(range(1)))
    assert counts == {"label_encoder": n_images, "semantic_encoder": n_images}
