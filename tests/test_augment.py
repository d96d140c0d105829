"""Training images in other guises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import TINY_RECIPE, source_for, tiny_store
from trident.augment import SHIFT, Guises, disguise, draw_guises


def images(size: int = 20, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, n, size, size, 3), generator=generator, dtype=torch.uint8)


def guises(mirrored: bool, down: int, right: int, n: int = 3) -> list[Guises]:
    return [Guises(np.full(n, mirrored), np.tile([down, right], (n, 1)))] * 2


def test_nothing_changes_nothing() -> None:
    assert torch.equal(disguise(images(), guises(False, 0, 0)), images())


def test_mirrored_and_shifted() -> None:
    original = images()
    assert torch.equal(disguise(original, guises(True, 0, 0)), original.flip(3))
    shifted = disguise(original, guises(False, 2, -1))
    assert torch.equal(shifted[:, :, 2:, :-1], original[:, :, :-2, 1:])
    assert torch.equal(shifted[:, :, 0], disguise(original, guises(False, 0, -1))[:, :, 2])  # reflected at the edge


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["flip", "flip_shift"]))
def test_what_is_drawn(seed: int, kind: str) -> None:
    drawn = draw_guises(kind, 500, 84, np.random.default_rng(seed))
    assert 150 < drawn.mirrored.sum() < 350
    most = 84 // SHIFT if kind == "flip_shift" else 0
    assert drawn.shifts.min() == -most
    assert drawn.shifts.max() == most


@pytest.mark.parametrize("kind", ["flip", "flip_shift"])
def test_tasks_are_the_same_but_for_their_guises(kind: str) -> None:
    store = tiny_store()
    plain = source_for(TINY_RECIPE, store).batch([3, 4])
    changed, again = (source_for(TINY_RECIPE, store, augmentation=kind).batch([3, 4]) for _ in range(2))
    alone = source_for(TINY_RECIPE, store, augmentation=kind).batch([4])
    assert torch.equal(changed.images.stored, again.images.stored)
    assert torch.equal(changed.images.stored[1:], alone.images.stored)
    assert not torch.equal(changed.images.stored, plain.images.stored)
    assert torch.equal(changed.query_labels, plain.query_labels)
    assert torch.equal(changed.query_noise[0].label, plain.query_noise[0].label)
    if kind == "flip":
        same = (changed.images.stored == plain.images.stored).flatten(2).all(2)
        mirrored = (changed.images.stored == plain.images.stored.flip(3)).flatten(2).all(2)
        assert bool((same | mirrored).all())
