"""Random changes of training images."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import TINY_RECIPE, source_for, tiny_store
from trident.tasks.augmentation import (
    COLOUR,
    LEAST_AREA,
    MOST_STRETCH,
    SHIFT,
    Augmentations,
    augment,
    draw_augmentations,
)
from trident.tasks.source import ClassSource


def images(size: int = 20, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, n, size, size, 3), generator=generator, dtype=torch.uint8)


def shifts(mirrored: bool, down: int, right: int, n: int = 3, size: int = 20) -> list[Augmentations]:
    return [Augmentations(np.full(n, mirrored), np.tile([-down, -right], (n, 1)), np.full((n, 2), size), None)] * 2


def crops(
    start: tuple[float, float], seen: tuple[float, float], colours: tuple[float, ...] = (1, 1, 1)
) -> list[Augmentations]:
    n = 3
    parts = (np.tile(np.array(part, float), (n, 1)) for part in (start, seen, colours))
    return [Augmentations(np.full(n, False), *parts)] * 2


def test_nothing_changes_nothing() -> None:
    assert torch.equal(augment(images(), shifts(False, 0, 0)), images())


def test_mirrored_and_shifted() -> None:
    original = images()
    assert torch.equal(augment(original, shifts(True, 0, 0)), original.flip(3))
    shifted = augment(original, shifts(False, 2, -1))
    assert torch.equal(shifted[:, :, 2:, :-1], original[:, :, :-2, 1:])
    assert torch.equal(shifted[:, :, 0], augment(original, shifts(False, 0, -1))[:, :, 2])  # reflected at the edge


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["flip", "flip_shift"]))
def test_what_is_drawn(seed: int, kind: str) -> None:
    drawn = draw_augmentations(kind, 500, 84, np.random.default_rng(seed))
    assert 150 < drawn.mirrored.sum() < 350
    most = 84 // SHIFT if kind == "flip_shift" else 0
    assert drawn.starts.min() == -most
    assert drawn.starts.max() == most


def test_what_is_drawn_of_crops() -> None:
    drawn = draw_augmentations("crop_colour", 2000, 84, np.random.default_rng(0))
    area = drawn.sizes.prod(1) / 84**2
    stretch = drawn.sizes[:, 0] / drawn.sizes[:, 1]
    assert LEAST_AREA * 0.8 < area.min() < LEAST_AREA * 1.02
    assert 0.98 < area.max() <= 1
    assert 1 / MOST_STRETCH - 1e-9 <= stretch.min() < 0.8
    assert 1.25 < stretch.max() <= MOST_STRETCH + 1e-9
    assert (drawn.starts >= 0).all()
    assert (drawn.starts + drawn.sizes <= 84 + 1e-9).all()
    assert drawn.colours is not None
    assert drawn.colours.min() < 1 - 0.95 * COLOUR
    assert drawn.colours.max() > 1 + 0.95 * COLOUR


def test_the_whole_image_in_its_own_colours_is_the_image() -> None:
    assert torch.equal(augment(images(), crops((0, 0), (20, 20))), images())
    assert torch.equal(augment(images(), crops((3, 1), (20, 20)))[:, :, :-3, :-1], images()[:, :, 3:, 1:])


def test_a_crop_is_enlarged_as_torch_would() -> None:
    original = images()
    cropped = augment(original, crops((4, 6), (10, 8)))
    part = original[:, :, 4:14, 6:14].flatten(0, 1).permute(0, 3, 1, 2).float()
    wanted = F.interpolate(part, (20, 20), mode="bilinear", align_corners=False).permute(0, 2, 3, 1)
    inside = (slice(None), slice(2, -2), slice(2, -2))  # further out the crop sees its neighbours, torch does not
    assert (cropped.flatten(0, 1).float() - wanted)[inside].abs().max() <= 0.51


def test_colours() -> None:
    original, whole = images(), ((0, 0), (20, 20))
    dark = augment(original, crops(*whole, (0.6, 1, 1)))
    assert (dark.float() - 0.6 * original.float()).abs().max() <= 0.51
    flat = augment(original, crops(*whole, (1, 0, 1))).flatten(2)
    assert bool((flat == flat[:, :, :1]).all())
    grey = augment(original, crops(*whole, (1, 1, 0)))
    looks = (original.float() * torch.tensor([0.299, 0.587, 0.114])).sum(-1, keepdim=True)
    assert (grey.float() - looks).abs().max() <= 0.51


@pytest.mark.parametrize("kind", ["flip", "flip_shift", "crop_colour"])
def test_tasks_are_the_same_but_for_their_augmentations(kind: str) -> None:
    store = tiny_store()
    plain = source_for(TINY_RECIPE, store).batch([3, 4])
    changed, again = (source_for(TINY_RECIPE, store, augmentation=kind).batch([3, 4]) for _ in range(2))
    alone = source_for(TINY_RECIPE, store, augmentation=kind).batch([4])
    assert torch.equal(changed.task.images, again.task.images)
    assert torch.equal(changed.task.images[1:], alone.task.images)
    assert not torch.equal(changed.task.images, plain.task.images)
    assert torch.equal(changed.labels.queries, plain.labels.queries)
    assert torch.equal(changed.task.noise["query/0/label"], plain.task.noise["query/0/label"])
    if kind == "flip":
        same = (changed.task.images == plain.task.images).flatten(2).all(2)
        mirrored = (changed.task.images == plain.task.images.flip(3)).flatten(2).all(2)
        assert bool((same | mirrored).all())


@pytest.mark.parametrize("kind", ["flip", "flip_shift", "crop_colour"])
def test_batches_of_all_classes_are_the_same_but_for_their_augmentations(kind: str) -> None:
    store = tiny_store()
    plain = ClassSource(store, 12, seed=0).batch([3])
    changed, again = (ClassSource(store, 12, seed=0, augmentation=kind).batch([3]) for _ in range(2))
    assert torch.equal(changed.task.images, again.task.images)
    assert not torch.equal(changed.task.images, plain.task.images)
    assert torch.equal(changed.labels.queries, plain.labels.queries)
