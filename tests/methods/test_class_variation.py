"""The Gaussian model of how images of one class differ, and features that are shortened along its directions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.learning.run_state import make_optimizer
from trident.methods.ensemble import Ensemble, directions_of, initial_variation, negative_log_likelihood, shortened
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.settings import EpisodeSpec
from trident.tasks.task import Labels, Task

BRANCHES, CELLS, CHANNELS = 2, 3, 4
CLASSES = [0, 3, 1, 3, 0, 0, 2, 3]  # of a batch: 1 and 2 have one image, 4 has none


def random_variation(n_directions: int, seed: int = 0) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    start = initial_variation(BRANCHES, n_directions, CELLS, CHANNELS, generator)
    start["variation.log_noise"] = torch.randn(BRANCHES, generator=generator)
    return {key: value.double() for key, value in start.items()}


def random_features(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, BRANCHES, CELLS * CHANNELS, generator=generator, dtype=torch.float64)


def test_a_direction_is_a_sum_of_products_of_cells_and_channels() -> None:
    parameters = random_variation(5)
    cells, channels, _ = (value[1].numpy() for value in parameters.values())  # of the second branch
    expected = np.sum([np.outer(*pair) for pair in zip(cells[2], channels[2], strict=True)], 0)
    np.testing.assert_allclose(directions_of(parameters)[1, 2].numpy(), expected.ravel())


def test_the_likelihood_is_that_of_the_whole_covariance() -> None:
    parameters, features, classes = random_variation(5), random_features(2, 8), torch.tensor([CLASSES, CLASSES[::-1]])
    found = negative_log_likelihood(parameters, features, classes, 5)
    directions, noise = directions_of(parameters).numpy(), parameters["variation.log_noise"].exp().numpy()
    for task in range(2):
        total = 0.0
        for branch in range(BRANCHES):
            covariance = directions[branch].T @ directions[branch] + noise[branch] * np.eye(12)
            squares, freedom = 0.0, 0
            for c in range(5):
                own = features[task, classes[task] == c, branch].numpy()
                for image in own:
                    apart = image - own.mean(0)
                    squares += apart @ np.linalg.solve(covariance, apart)
                freedom += max(len(own) - 1, 0)
            total += (squares / freedom + np.linalg.slogdet(covariance)[1]) / (2 * 12 * BRANCHES)
        assert found[task].item() == pytest.approx(total, rel=1e-9)


def test_a_batch_without_two_images_of_a_class_teaches_nothing() -> None:
    found = negative_log_likelihood(random_variation(5), random_features(1, 5), torch.arange(5)[None], 5)
    assert found.item() == 0


def test_the_gradient_of_the_likelihood_is_right() -> None:
    parameters, features, classes = random_variation(5), random_features(1, 8), torch.tensor([CLASSES])

    def loss(*values: Tensor) -> Tensor:
        return negative_log_likelihood(dict(zip(parameters, values, strict=True)), features, classes, 5)

    assert torch.autograd.gradcheck(loss, [value.requires_grad_() for value in parameters.values()], fast_mode=True)


def test_learning_finds_the_directions_in_which_images_of_a_class_differ() -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = initial_variation(BRANCHES, 2, CELLS, CHANNELS, generator)
    parameters["variation.log_noise"] += 5  # these features are larger than those of unit length
    leaves = [value.requires_grad_() for value in parameters.values()]
    directions = directions_of(random_variation(2, seed=3)).float()
    classes = torch.randint(5, (1, 500), generator=generator)
    means = 10 * torch.randn(5, BRANCHES, 12, generator=generator)
    within = torch.einsum("ibd,bdf->ibf", torch.randn(500, BRANCHES, 2, generator=generator), directions)
    images = means[classes[0]] + within + 0.01 * torch.randn(500, BRANCHES, 12, generator=generator)
    optimizer = torch.optim.Adam(leaves)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 300)
        loss = negative_log_likelihood(parameters, images[None], classes, 5).sum()
        for leaf, slope in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            leaf.grad = slope
        optimizer.step()
    found, expected = (value.mT @ value for value in (directions_of(parameters).detach(), directions))
    assert (found - expected).norm() < 0.15 * expected.norm()


def test_features_are_divided_along_principal_directions() -> None:
    parameters, features, damping = random_variation(5), random_features(2, 8), 7.0
    found = shortened(parameters, features, damping).numpy()
    for branch, directions in enumerate(directions_of(parameters).numpy()):
        variances, principal = np.linalg.eigh(directions.T @ directions)
        factors = 1 / np.sqrt(1 + damping * variances / variances.max())
        expected = features[:, :, branch].numpy() @ (principal * factors) @ principal.T
        np.testing.assert_allclose(found[:, :, branch], expected, rtol=1e-9)
    torch.testing.assert_close(shortened(parameters, features, 0.0), features)
    nothing = parameters | {"variation.cells": torch.zeros_like(parameters["variation.cells"])}
    torch.testing.assert_close(shortened(nothing, features, damping), features)


def an_ensemble(**changed: object) -> tuple[Ensemble, Parameters, Tensor, Task]:
    method = Ensemble(5, branches=2, prototype_weight=1.0, variation=3, **changed)  # type: ignore[arg-type]
    backbone = Conv4Backbone(image_size=32, channels=4, branches=2)
    generator = torch.Generator().manual_seed(2)
    parameters = method.model(backbone, EpisodeSpec(3, 1, 2)).initial(generator)
    features = torch.randn(1, 9, backbone.n_features, generator=generator)
    return method, parameters, features, Task(features, torch.tensor([[0, 1, 2]]), 3)


def test_the_model_does_not_change_what_the_branches_learn() -> None:
    method, parameters, features, task = an_ensemble()
    labels = Labels(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]]))
    gradients = []
    for used in (method, replace(method, variation=0)):
        leaf = features.clone().requires_grad_()
        losses = used.training(parameters, leaf, task, labels)[1]
        gradients.append(torch.autograd.grad(losses["total"].sum(), leaf)[0])
        parts = sum(part for name, part in losses.items() if name != "total")
        torch.testing.assert_close(losses["total"], parts)
    torch.testing.assert_close(*gradients)


def test_piles_are_classified_with_damping_and_single_queries_without() -> None:
    method, parameters, features, task = an_ensemble()
    without = replace(method, variation=0)
    unit = torch.nn.functional.normalize(features.reshape(1, 9, 2, -1), dim=3)
    expected = super(Ensemble, method).head(parameters, shortened(parameters, unit, 10.0).flatten(2), task)
    torch.testing.assert_close(method.head(parameters, features, task), expected)
    assert not torch.allclose(expected, without.head(parameters, features, task), atol=1e-3)
    for same in (method.for_few_queries(), replace(method, rounds=0, centre="support", damping=0.0)):
        torch.testing.assert_close(
            same.head(parameters, features, task), without.for_few_queries().head(parameters, features, task)
        )
    alone = task.with_images(features[:, :4])
    torch.testing.assert_close(
        method.head(parameters, features[:, :4], alone), without.head(parameters, features[:, :4], alone)
    )
    assert method.describe() == "2 branches, damping 10, 8 rounds, learned class sizes"
    assert method.for_few_queries().describe().startswith("2 branches, 0 rounds")


def test_weight_decay_leaves_the_model_alone() -> None:
    recipe = load_recipe("glyphs-ensemble", ["method.variation=3", "training.weight_decay=0.5"])
    parameters = {key: value.requires_grad_() for key, value in recipe.initial(0).items()}
    before = {key: value.detach().clone() for key, value in parameters.items()}
    optimizer = make_optimizer(parameters, Checkpoint(recipe, parameters, {}, 0))
    for value in parameters.values():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    unchanged = {key for key, value in parameters.items() if torch.equal(value, before[key])}
    zero = {key for key, value in before.items() if not value.any()}
    assert unchanged == zero | {"variation.cells", "variation.channels", "variation.log_noise"}


def test_settings_that_do_not_fit_are_errors() -> None:
    episode = EpisodeSpec(3, 1, 2)
    with pytest.raises(TridentError, match=r"method.variation needs the feature maps of 2 networks"):
        Ensemble(5, branches=2, variation=3).model(FrozenBackbone("features", 8), episode)
    with pytest.raises(TridentError, match=r"method.variation is 5: it must be at most 4"):
        Ensemble(5, branches=2, variation=5).model(Conv4Backbone(image_size=16, channels=4, branches=2), episode)
    with pytest.raises(TridentError, match=r"method.damping is -1"):
        Ensemble(5, damping=-1)
