"""MAML and its relatives: exact gradients, and agreement with plain code."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapted_conv4 import METHODS, images_of, learner_of, methods, plain_adaptation, plain_network, tasks_for
from tiny import TINY_BACKBONE, TINY_EPISODE, one_task
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.methods.inner_loop.adapted_conv4 import SUPPORT_FEATURES
from trident.methods.inner_loop.base import Inputs
from trident.methods.inner_loop.boil import Boil
from trident.methods.inner_loop.maml import Maml
from trident.methods.inner_loop.vampire import Vampire
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch


def training_loss(learner: InnerLoopLearner, parameters: Parameters, batch: Batch) -> float:
    """The loss that training minimises, summed over the tasks, without its gradient."""
    task, labels = batch
    adapted, _ = learner._adapt(parameters, task, labels)[-1]
    with torch.no_grad():
        found = learner.model.loss(adapted, Inputs(task, learner.statistics(task), labels=labels))
    return float(found.losses["total"].sum())


@pytest.mark.parametrize(
    ("name", "batch_norm", "settings"),
    [
        *((name, "transductive", {}) for name in METHODS),
        ("maml", "support", {"inner_optimizer": "adam", "inner_rate": 0.01}),
        ("anil", "support", {}),
    ],
)
def test_the_meta_gradient_against_finite_differences(name: str, batch_norm: str, settings: dict[str, Any]) -> None:
    learner, parameters = learner_of(name, batch_norm, **settings)
    batch = tasks_for(learner)
    found = learner.gradient(parameters, batch)
    assert found.gradient.keys() == parameters.keys()
    assert found.finite.tolist() == [True, True]
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}
        length = torch.stack([value.norm() for value in along.values()]).norm()

        def loss(distance: float, along: Parameters = along, length: Tensor = length) -> float:
            moved = {key: value + distance / length * along[key] for key, value in parameters.items()}
            return training_loss(learner, moved, batch)

        actual = float(sum((found.gradient[key] * along[key]).sum() for key in along) / length)
        # The network has kinks, which a long step may cross; a wrong gradient agrees with neither step.
        errors = (abs(actual * 2 * step / (loss(step) - loss(-step)) - 1) for step in (1e-5, 1e-6, 1e-7))
        assert any(error < 1e-5 for error in errors)


@methods
def test_tasks_do_not_see_each_other(name: str) -> None:
    learner, parameters = learner_of(name)
    batch = tasks_for(learner)
    together = learner.gradient(parameters, batch)
    apart = [learner.gradient(parameters, one_task(batch, index)) for index in range(2)]
    for key, value in together.gradient.items():
        torch.testing.assert_close(value, apart[0].gradient[key] + apart[1].gradient[key])
    for key, value in together.losses.items():
        torch.testing.assert_close(value, torch.cat([one.losses[key] for one in apart]))


@methods
def test_every_parameter_that_can_matter_has_a_gradient(name: str) -> None:
    """The biases before batch norm cancel; all else matters, in every method."""
    learner, parameters = learner_of(name)
    gradient = learner.gradient(parameters, tasks_for(learner)).gradient
    without = {key for key, value in gradient.items() if not value.any()}
    cancelled = {key for key in parameters if "backbone" in key and key.endswith("bias")}
    assert without <= cancelled


@pytest.mark.parametrize(("name", "moves"), [("maml", ""), ("anil", "head."), ("boil", "backbone.")])
@pytest.mark.parametrize("order", ["second", "first"])
def test_losses_gradients_and_predictions_are_those_of_plain_code(name: str, moves: str, order: str) -> None:
    """One task at a time, torch's own layers, differentiated as a whole."""
    learner, parameters = learner_of(name, inner_order=order)
    batch = tasks_for(learner)
    found = learner.gradient(parameters, batch)
    predicted = learner.log_probabilities(parameters, batch.task)
    steps, rate = learner.method.inner_steps, learner.method.inner_rate
    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    losses = []
    for index in range(2):
        support, queries = images_of(batch.task, index)
        labels = batch.task.support_labels[index]
        adapted = plain_adaptation(leaves, support, labels, steps, rate, moves, order == "second")
        logits = plain_network(adapted, queries)
        torch.testing.assert_close(predicted[index], torch.log_softmax(logits, 1).detach(), rtol=1e-7, atol=1e-7)
        losses.append(F.cross_entropy(logits, batch.labels.queries[index]))
    torch.testing.assert_close(found.losses["total"], torch.stack(losses).detach())
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(leaves.values()))
    for key, value in zip(leaves, expected, strict=True):
        if not key.endswith("bias") or key.startswith("head"):  # others cancel in batch norm
            torch.testing.assert_close(found.gradient[key], value, rtol=1e-6, atol=1e-8)


def test_what_adapts() -> None:
    adapting = {"maml": ("backbone.", "head."), "anil": ("head.",), "boil": ("backbone.",)}
    for name, prefixes in adapting.items():
        learner, parameters = learner_of(name)
        (before, _), *_, (after, _) = learner.adapt(parameters, tasks_for(learner).task)
        moved = {key for key in parameters if not torch.equal(before[key], after[key])}
        cancelled = {key for key in parameters if key.startswith("backbone") and key.endswith("bias")}
        assert moved | cancelled == {key for key in parameters if key.startswith(prefixes)} | cancelled
        assert (SUPPORT_FEATURES in after) == (name == "anil")


def test_training_and_test_may_take_different_numbers_of_steps() -> None:
    assert (Maml().inner_steps, Maml().in_training().inner_steps) == (10, 5)
    assert Maml(inner_steps=7, training_inner_steps=None).in_training().inner_steps == 7
    assert (Boil().inner_steps, Boil().in_training().inner_steps, Boil().inner_rate) == (1, 1, 0.5)
    model = Vampire().in_training().model(TINY_BACKBONE, TINY_EPISODE)
    assert len(model.noise_shapes(TINY_EPISODE, 1)) == 5 + 1
