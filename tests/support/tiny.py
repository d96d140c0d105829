"""A network small enough to check exactly, tasks for it, and a check of gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trident.backbones.conv4 import Conv4Backbone
from trident.data.store import ImageStore, class_table, store_in_memory
from trident.engines.learner import Learner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.methods.metric.protonet import ProtoNet
from trident.methods.trident.network import Trident
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol, TrainingSettings
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource
from trident.tasks.task import Batch, Labels, Task

TINY_EPISODE = EpisodeSpec(n_way=3, n_shot=2, n_query=2)
TINY_BACKBONE = Conv4Backbone(image_size=16, image_channels=1, channels=4)
TINY_METHOD = Trident(
    label_latents=5,
    semantic_latents=6,
    classifier_width=4,
    attfex_width_m=6,
    attfex_width_n=4,
    attention_activation=True,
    decoder_batch_norm=True,
    inner_rate=1e-3,
    inner_steps=2,
)
TINY_RECIPE = Recipe(
    name="tiny",
    summary="for tests",
    dataset="noise",
    episode=TINY_EPISODE,
    backbone=TINY_BACKBONE,
    method=TINY_METHOD,
    training=TrainingSettings(
        steps=20, tasks_per_step=2, rate=1e-3, validate_every=10, validation_tasks=4, save_every=5, log_every=2
    ),
)


class TheirMethod(ProtoNet):
    """A method of somebody else's package."""


class Silent:
    """Watches a training run and says nothing."""

    def on_step(self, step: int, values: dict[str, Any]) -> None: ...

    def on_validation(self, step: int, validated: Any, best: bool) -> None: ...


def tiny_store(images_per_class: int = 8, size: int = 16) -> ImageStore:
    """Five classes for each split, each a pattern of its own with a little noise."""
    generator = np.random.default_rng(7)
    patterns = generator.integers(0, 200, (15, 1, size, size, 1))
    images = patterns + generator.integers(0, 56, (15, images_per_class, size, size, 1))
    names = [
        (f"class {i}", split, images_per_class) for i, split in enumerate(["train"] * 5 + ["val"] * 5 + ["test"] * 5)
    ]
    return store_in_memory("noise", images.reshape(-1, size, size, 1).astype(np.uint8), class_table(names))


def tiny_tasks(n_tasks: int = 2, inner_steps: int = 3, seed: int = 0, episode: EpisodeSpec = TINY_EPISODE) -> Batch:
    """Random tasks in float64, with noise for TINY_METHOD."""
    generator = torch.Generator().manual_seed(seed)
    model = replace(TINY_METHOD, inner_steps=inner_steps).model(TINY_BACKBONE, episode)
    noise = {
        name: torch.randn((n_tasks, *shape), generator=generator, dtype=torch.float64)
        for name, shape in model.noise_shapes(episode, 1).items()
    }
    size = TINY_BACKBONE.image_size
    pixels = torch.rand(n_tasks, episode.n_images, size, size, 1, generator=generator, dtype=torch.float64)
    ways = torch.arange(episode.n_way)
    labels = torch.stack(
        [torch.randperm(episode.n_queries, generator=generator) % episode.n_way for _ in range(n_tasks)]
    )
    support_labels = ways.repeat_interleave(episode.n_shot).expand(n_tasks, -1)
    return Batch(Task(pixels, support_labels, episode.n_way, noise), Labels(labels))


def one_task(batch: Batch, index: int) -> Batch:
    """One task of a batch, as a batch of its own."""
    only, (task, labels) = slice(index, index + 1), batch
    noise = {name: values[only] for name, values in task.noise.items()}
    classes = None if labels.training_classes is None else labels.training_classes[only]
    return Batch(
        Task(task.images[only], task.support_labels[only], task.n_way, noise), Labels(labels.queries[only], classes)
    )


def tiny_learner(batch_norm: str = "transductive", **method: Any) -> InnerLoopLearner:
    """TINY_METHOD with other settings where given; `channels` and `activation` are the backbone's."""
    of_backbone = {key: method.pop(key) for key in ("channels", "activation") if key in method}
    settings = replace(TINY_METHOD, **method)
    return InnerLoopLearner(settings.model(replace(TINY_BACKBONE, **of_backbone), TINY_EPISODE), batch_norm)


def initial(model: Any, seed: int = 0) -> Parameters:
    """Random weights of a model."""
    parameters: Parameters = model.initial(torch.Generator().manual_seed(seed))
    return parameters


def doubles(parameters: Parameters) -> Parameters:
    return {key: value.double() for key, value in parameters.items()}


def check_gradient(learner: Learner, parameters: Parameters, batch: Batch) -> None:
    """The gradient of the total loss, in two directions, against finite differences."""
    found = learner.gradient(parameters, batch)
    assert found.gradient.keys() == parameters.keys()
    assert found.finite.all()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

        def loss(distance: float, along: Parameters = along) -> float:
            moved = {key: value + distance * along[key] for key, value in parameters.items()}
            return float(learner.gradient(moved, batch).losses["total"].sum())

        actual = float(sum((found.gradient[key] * along[key]).sum() for key in along))
        # The network has kinks, which a long step may cross; a wrong gradient agrees with neither step.
        errors = (abs(actual * 2 * step / (loss(step) - loss(-step)) - 1) for step in (1e-6, 1e-7))
        assert any(error < 1e-6 for error in errors)


def source_for(recipe: Recipe, store: ImageStore, stream: str = "train", **options: Any) -> TaskSource:
    sampler = EpisodeSampler(store, stream, recipe.episode, Protocol())
    return TaskSource(sampler, recipe.model.noise_shapes(recipe.episode, 1), 0, stream, **options)
