"""The inner loop and the meta-gradient: exact, the same for many tasks as for one, in constant memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from conftest import TINY_RECIPE, doubles, one_task, source_for, tiny_learner, tiny_store, tiny_tasks
from trident.learning.inner_loop import InnerState, Learner, TaskBatch, _adam_step
from trident.methods.trident.network import Trident
from trident.nn.parameters import Parameters
from trident.settings import AdaptationSettings

RATES = {"sgd": 1e-2, "adam": 1e-2}


def query_loss_after_adaptation(learner: Learner, parameters: Parameters, tasks: TaskBatch) -> float:
    adapted, _ = learner.adapt(parameters, tasks)[-1]
    with torch.no_grad():
        parts, _, _ = learner.loss(adapted, tasks, "query", tasks.query_noise[0])
    return float(parts.total.sum())


def directional_derivative(
    learner: Learner, parameters: Parameters, tasks: TaskBatch, along: Parameters, step: float
) -> float:
    """Central differences of fourth order."""

    def at(distance: float) -> float:
        moved = {key: value + distance * step * along[key] for key, value in parameters.items()}
        return query_loss_after_adaptation(learner, moved, tasks)

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def assert_exact(learner: Learner, parameters: Parameters, tasks: TaskBatch, directions: int) -> None:
    """The meta-gradient against finite differences, along random directions."""
    gradient = learner.meta_gradient(parameters, tasks).gradient
    generator = torch.Generator().manual_seed(5)
    for _ in range(directions):
        along = {
            key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in parameters.items()
        }
        length = torch.stack([value.norm() for value in along.values()]).norm()
        along = {key: value / length for key, value in along.items()}
        actual = float(sum((gradient[key] * along[key]).sum() for key in gradient))
        # The network has kinks. A long step may cross one, a short one drowns small derivatives in rounding; a wrong
        # gradient agrees with neither.
        expected = [directional_derivative(learner, parameters, tasks, along, step) for step in (1e-6, 1e-7)]
        assert min(abs(actual / value - 1) for value in expected) < 1e-6


@pytest.mark.parametrize(
    ("optimizer", "batch_norm", "classifier_start", "block_order"),
    [
        ("sgd", "transductive", "learned", "activation_pool"),
        ("adam", "transductive", "learned", "activation_pool"),
        ("sgd", "support", "learned", "pool_activation"),
        ("adam", "support", "learned", "activation_pool"),
        ("sgd", "transductive", "prototypes", "pool_activation"),
        ("adam", "support", "prototypes", "pool_activation"),
    ],
)
def test_meta_gradient_against_finite_differences(
    optimizer: str, batch_norm: str, classifier_start: str, block_order: str
) -> None:
    adaptation = AdaptationSettings(optimizer, RATES[optimizer], 3)  # type: ignore[arg-type]
    learner = tiny_learner(adaptation, batch_norm, classifier_start=classifier_start, block_order=block_order)
    parameters, tasks = doubles(learner.model.initial(1)), tiny_tasks()
    for key in parameters:
        if key.endswith("norm.gain"):
            parameters[key][::2] *= -0.7  # training can turn a batch norm's line upside down
    assert_exact(learner, parameters, tasks, directions=10)


def test_a_wider_label_encoder_and_a_head_for_all_training_classes() -> None:
    model: dict[str, Any] = {"label_channels": 7, "training_classes": 9, "classifier_start": "prototypes"}
    learner = tiny_learner(AdaptationSettings("sgd", RATES["sgd"], 2, refinements=1), **model)
    parameters, tasks = doubles(learner.model.initial(1)), tiny_tasks()
    assert parameters["label_encoder.0.bias"].shape == (7,)
    assert parameters["semantic_encoder.0.bias"].shape == (4,)
    classes = torch.randint(0, 9, tasks.query_labels.shape, generator=torch.Generator().manual_seed(3))
    assert_exact(learner, parameters, tasks._replace(query_classes=classes), directions=5)
    without = learner.meta_gradient(parameters, tasks)
    assert not without.gradient["training_classes.weight"].any()
    assert not without.loss.training_classes.any()


def test_meta_gradient_is_that_of_the_unrolled_loop() -> None:
    """Plain autograd through all inner steps at once, the definition of MAML, gives the same."""
    learner = tiny_learner(AdaptationSettings("sgd", 1e-2, 3))
    start, tasks = doubles(learner.model.initial(1)), tiny_tasks()
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    current = {key: value.expand(tasks.n_tasks, *value.shape) for key, value in leaves.items()}
    for step in range(3):
        parts, _, _ = learner.loss(current, tasks, "support", tasks.support_noise[step])
        inner = torch.autograd.grad(
            parts.total.sum(), list(current.values()), create_graph=True, materialize_grads=True
        )
        current = {key: value - 1e-2 * g for (key, value), g in zip(current.items(), inner, strict=True)}
    parts, _, _ = learner.loss(current, tasks, "query", tasks.query_noise[0])
    expected = torch.autograd.grad(parts.total.sum(), list(leaves.values()), materialize_grads=True)
    actual = learner.meta_gradient(start, tasks).gradient
    for key, value in zip(leaves, expected, strict=True):
        torch.testing.assert_close(actual[key], value)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_many_tasks_at_once_are_as_one_after_the_other(optimizer: str) -> None:
    learner = tiny_learner(AdaptationSettings(optimizer, RATES[optimizer], 3))  # type: ignore[arg-type]
    parameters, tasks = doubles(learner.model.initial(1)), tiny_tasks(n_tasks=4)
    together = learner.meta_gradient(parameters, tasks)
    apart = [learner.meta_gradient(parameters, one_task(tasks, index)) for index in range(4)]
    for key, value in together.gradient.items():
        torch.testing.assert_close(value, sum(single.gradient[key] for single in apart))
    torch.testing.assert_close(together.loss.total, torch.cat([single.loss.total for single in apart]))
    torch.testing.assert_close(together.accuracy, torch.cat([single.accuracy for single in apart]))


@pytest.mark.parametrize("poisoned", ["support", "query"])
@pytest.mark.parametrize("classifier_start", ["learned", "prototypes"])
def test_a_task_that_blows_up_is_left_out_and_spoils_nothing_else(poisoned: str, classifier_start: str) -> None:
    learner = tiny_learner(AdaptationSettings(rate=1e-2, steps=2), classifier_start=classifier_start)
    parameters = doubles(learner.model.initial(0))
    tasks = tiny_tasks(3, inner_steps=2)
    noises = tasks.support_noise[1:] if poisoned == "support" else tasks.query_noise
    noises[0].label[1] = float("inf")
    found = learner.meta_gradient(parameters, tasks)
    assert found.finite.tolist() == [True, False, True]
    apart = [learner.meta_gradient(parameters, one_task(tasks, task)).gradient for task in (0, 2)]
    for key, value in found.gradient.items():
        torch.testing.assert_close(value, apart[0][key] + apart[1][key], rtol=1e-4, atol=1e-4)


def test_a_gradient_that_blows_up_counts_though_the_loss_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = Learner._pull_back

    def overflowing(learner: Learner, pulled: Parameters, *rest: Any) -> Any:
        found, moments = pull(learner, pulled, *rest)
        for value in found.values():
            value[1] = float("inf")
        return found, moments

    monkeypatch.setattr(Learner, "_pull_back", overflowing)
    learner = tiny_learner(AdaptationSettings(rate=1e-2, steps=1))
    found = learner.meta_gradient(doubles(learner.model.initial(0)), tiny_tasks(3, inner_steps=1))
    assert bool(found.loss.total.isfinite().all())
    assert found.finite.tolist() == [True, False, True]
    assert all(bool(value.isfinite().all()) for value in found.gradient.values())


def test_first_order_stops_at_the_adapted_parameters() -> None:
    learner = tiny_learner(AdaptationSettings("sgd", 1e-2, 3, "first"))
    parameters, tasks = doubles(learner.model.initial(1)), tiny_tasks()
    adapted = {key: value.requires_grad_() for key, value in learner.adapt(parameters, tasks)[-1][0].items()}
    parts, _, _ = learner.loss(adapted, tasks, "query", tasks.query_noise[0])
    expected = torch.autograd.grad(parts.total.sum(), list(adapted.values()), materialize_grads=True)
    actual = learner.meta_gradient(parameters, tasks).gradient
    for key, value in zip(adapted, expected, strict=True):
        torch.testing.assert_close(actual[key], value.sum(0))
    second = tiny_learner(AdaptationSettings("sgd", 1e-2, 3, "second")).meta_gradient(parameters, tasks).gradient
    assert not torch.allclose(actual["label.loc.weight"], second["label.loc.weight"])


def test_inner_adam_is_torchs() -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    leaf = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([leaf], lr=1e-2)
    parameters, zeros = {"x": start}, {"x": torch.zeros_like(start)}
    state = InnerState(zeros, zeros)
    for step in range(4):
        gradient = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        leaf.grad = gradient
        optimizer.step()
        parameters, state = _adam_step(parameters, state, {"x": gradient}, step, 1e-2)
        torch.testing.assert_close(parameters["x"], leaf.detach())


def test_adaptation_lowers_the_support_loss() -> None:
    learner = Learner(
        Trident(TINY_RECIPE.model, TINY_RECIPE.episode), TINY_RECIPE.objective, AdaptationSettings(steps=5)
    )
    tasks = source_for(TINY_RECIPE, tiny_store()).batch(range(4))
    tasks = tasks._replace(support_noise=(tasks.support_noise[0],) * 5)
    parameters = learner.model.initial(0)
    trajectory = learner.adapt(parameters, tasks)
    with torch.no_grad():
        before, after = (
            learner.loss(entry, tasks, "support", tasks.support_noise[0])[0].total
            for entry, _ in (trajectory[0], trajectory[-1])
        )
    assert bool((after < before).all())


MEASURE = """
import resource, sys
from dataclasses import replace
import torch
from trident.learning.inner_loop import Learner
from trident.data.glyphs import open_glyphs
from trident.tasks.episodes import EpisodeSampler
from trident.methods.trident.network import Trident
from trident.recipes import load_recipe
from trident.tasks.source import TaskSource
recipe = load_recipe("glyphs", [f"adaptation.steps={sys.argv[1]}"])
learner = Learner(Trident(recipe.model, recipe.episode), recipe.objective, recipe.adaptation)
sampler = EpisodeSampler(open_glyphs(), "train", recipe.episode, recipe.protocol)
tasks = TaskSource(sampler, recipe.model, recipe.adaptation, 0, "train").batch(range(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
learner.meta_gradient(learner.model.initial(0), tasks)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_inner_steps() -> None:
    """Peak memory of the meta-gradient alone, measured in processes of their own, on real glyph tasks."""

    def peak(steps: int) -> int:
        result = subprocess.run([sys.executable, "-c", MEASURE, str(steps)], capture_output=True, text=True, check=True)
        return int(result.stdout)

    assert peak(10) <= 1.2 * peak(2)
