"""Predictions from several views of the same images."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tiny import TINY_RECIPE, source_for, tiny_store
from trident.engines.execution import Execution, make_learner
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.evaluate import evaluate
from trident.measuring.prediction import predict
from trident.settings import Views
from trident.tasks.views import views_of

EITHER = (False, True)
every = pytest.mark.parametrize("views", [Views(m, c, s) for m in EITHER for c in EITHER for s in EITHER], ids=str)


def numbered(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Images (2, 3, size, size, 2) whose pixels say in which row and column they are."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return torch.stack([rows, columns], 2).expand(2, 3, -1, -1, -1).to(dtype)


@every
def test_how_many_views_there_are_and_that_the_image_is_the_first(views: Views) -> None:
    images = torch.randint(0, 256, (2, 3, 14, 14, 1), dtype=torch.uint8)
    shown = list(views_of(images, views))
    assert len(shown) == views.number == (1 + views.mirrored) * (1 + 2 * views.shifted) + 4 * views.corners
    assert torch.equal(shown[0], images)
    assert all(view.shape == images.shape and view.dtype == images.dtype for view in shown)
    for one, other in pairwise(shown):
        assert not torch.equal(one, other)


def test_corners_are_spread_over_the_whole_image() -> None:
    corners = list(views_of(numbered(84, torch.float64), Views(corners=True)))[1:]
    for corner, (top, left) in zip(corners, ((0, 0), (0, 12), (12, 0), (12, 12)), strict=True):
        seen = (torch.arange(84, dtype=torch.float64) + 0.5) * 72 / 84 - 0.5
        seen = seen.clamp(0, 71)  # beyond the middle of an edge pixel there is only that pixel
        assert torch.allclose(corner[1, 2, :, 5, 0], top + seen)
        assert torch.allclose(corner[1, 2, 5, :, 1], left + seen)


def test_shifted_images_are_reflected_at_their_edges() -> None:
    _, up, down = views_of(numbered(84, torch.int64), Views(shifted=True))
    for axis, seen in enumerate((up[1, 2, :, 5, 0], up[1, 2, 5, :, 1])):
        assert seen.tolist() == [*range(2, 84), 82, 81], axis
    assert down[0, 0, :, 0, 0].tolist() == down[0, 0, 0, :, 1].tolist() == [2, 1, *range(82)]


def test_whole_numbers_stay_whole() -> None:
    exact = views_of(numbered(84, torch.float64), Views(True, True))
    for whole, fraction in zip(views_of(numbered(84, torch.uint8), Views(True, True)), exact, strict=True):
        assert (whole.double() - fraction).abs().max() <= 0.5 + 1e-5


@pytest.mark.parametrize("corners", [False, True])
def test_all_views_share_in_the_prediction(corners: bool) -> None:
    views = Views(mirrored=True, corners=corners)
    recipe, store = replace(TINY_RECIPE, views=views), tiny_store()
    learner, parameters = make_learner(recipe, Execution()), recipe.initial(0)
    task = source_for(recipe, store, "test", sampled=False).batch(range(4)).task

    def of(images: torch.Tensor, *more: Views) -> torch.Tensor:
        return predict(learner, parameters, task.with_images(images), *more).exp()

    together = of(task.images, views)
    singly = torch.stack([of(images) for images in views_of(task.images, views)])
    assert not torch.allclose(singly[0], singly[-1], atol=1e-4)
    torch.testing.assert_close(together, singly.mean(0))
    # A picture and its mirror image have the same views.
    torch.testing.assert_close(of(task.images.flip(3), views), together)
    checkpoint = Checkpoint(recipe, parameters, recipe.model.initial_running(), step=0)
    measured = evaluate(checkpoint, store, split="test", tasks=4, seed=0)
    np.testing.assert_allclose(np.exp(measured.predictions.log_probabilities), together.double(), atol=1e-5)
    words = "mirror images and corners too" if corners else "mirror images too"
    assert words in measured.describe_protocol()


def test_training_sees_images_as_they_are() -> None:
    assert replace(TINY_RECIPE, views=Views(True, True)).in_training().views == Views()


def test_only_methods_on_features_average_features() -> None:
    with pytest.raises(TridentError, match=r"views.average is 'features': TRIDENT averages probabilities only"):
        replace(TINY_RECIPE, views=Views(True, average="features"))
