"""Batches: each depends on the seed and on its number, and on nothing else."""

import numpy as np
import torch

from tiny import TINY_RECIPE, source_for, tiny_store
from trident.tasks.source import ClassSource


def test_batches_of_classes_differ_and_come_again() -> None:
    store = tiny_store()
    source = ClassSource(store, 16, seed=3)
    first, second = source.batch([4]), source.batch([5])
    assert not torch.equal(first.task.images, second.task.images)
    again = ClassSource(store, 16, seed=3).batch([4, 5])
    assert torch.equal(again.task.images, torch.cat([first.task.images, second.task.images]))
    assert not torch.equal(ClassSource(store, 16, seed=4).batch([4]).task.images, first.task.images)
    for image, label in zip(first.task.images[0], first.labels.queries[0].tolist(), strict=True):
        entry = store.classes_of("train")[label]
        same = (store.images[entry.start : entry.start + entry.count] == image.numpy()).all((1, 2, 3))
        assert same.any()  # an image of the class that its label names


def test_every_draw_of_noise_is_its_own() -> None:
    source = source_for(TINY_RECIPE, tiny_store())
    batch = source.batch([0, 1])
    draws = [values[task].flatten()[:8].numpy() for values in batch.task.noise.values() for task in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == len(draws)
    assert np.abs(np.corrcoef(np.stack(draws)) - np.eye(len(draws))).max() < 0.999
    other = source_for(TINY_RECIPE, tiny_store())
    other.seed = 1
    name = next(iter(batch.task.noise))
    assert not torch.equal(other.batch([0]).task.noise[name][0], batch.task.noise[name][0])
