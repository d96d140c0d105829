"""Made-up images and tasks, for timing without a dataset."""

import numpy as np

from trident.backbones.conv4 import conv4_of
from trident.data.store import SPLITS, ImageStore, class_table, store_in_memory
from trident.recipes.recipe import Recipe
from trident.settings import Protocol
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource
from trident.tasks.task import Batch

BLOCKS = 7  # along each side of an image
IMAGES_PER_CLASS = 1000  # of a large store, as in ImageNet


def made_up_store(recipe: Recipe) -> ImageStore:
    """Just enough images of the recipe's size for its tasks, the same in each split.

    Coloured blocks with a little noise. They are smooth like photographs: with pure noise, float32 errors would be
    larger.
    """
    backbone = conv4_of(recipe.backbone, "this benchmark")
    size, channels = backbone.image_size, backbone.image_channels
    spec = recipe.episode
    n_way, per_class = spec.n_way + spec.distractors, spec.n_shot + spec.n_query + spec.n_unlabelled
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 236, (n_way * per_class, BLOCKS, BLOCKS, channels))
    repeats = -(-size // BLOCKS)
    blocks = blocks.repeat(repeats, 1).repeat(repeats, 2)[:, :size, :size]
    images = (blocks + generator.integers(0, 20, blocks.shape)).astype(np.uint8)
    classes = class_table((f"{split} {i}", split, per_class) for split in SPLITS for i in range(n_way))
    return store_in_memory("made-up images", np.concatenate([images] * len(SPLITS)), classes)


def large_made_up_store(recipe: Recipe, n_images: int) -> ImageStore:
    """About so many different images in memory, once, to time the drawing of tasks from a large store.

    They are those of `made_up_store`, shifted in brightness.
    """
    small = made_up_store(recipe)
    few = small.images[: len(small.images) // len(SPLITS)]
    needed, fewest_classes = recipe.episode.n_shot + recipe.episode.n_query, len(small.classes)
    per_class = max(needed, min(IMAGES_PER_CLASS, n_images // fewest_classes))
    n_classes = max(fewest_classes, n_images // per_class)
    images = np.empty((n_classes * per_class, *few.shape[1:]), np.uint8)
    for shift, start in enumerate(range(0, len(images), len(few))):
        part = images[start : start + len(few)]
        np.add(few[: len(part)], np.uint8(shift % 256), out=part)  # overflow is fine: no accuracy is measured
    held_out = [f"{split} {i}" for split in SPLITS[1:] for i in range(recipe.episode.n_way)]
    names = [*(f"train {i}" for i in range(n_classes - len(held_out))), *held_out]
    classes = class_table((name, name.split()[0], per_class) for name in names)
    return ImageStore("made-up images", images, classes, f"{n_images} made-up images of {recipe.name}")


def made_up_tasks(recipe: Recipe, n_tasks: int) -> Batch:
    """Training tasks with made-up images, on the CPU."""
    sampler = EpisodeSampler(made_up_store(recipe), "train", recipe.episode, Protocol())
    return TaskSource(sampler, recipe.model.noise_shapes(recipe.episode, 1), 0, "train").batch(range(n_tasks))
