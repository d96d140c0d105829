"""The inner loop and the meta-gradient: exact, the same for many tasks as for one, in constant memory."""

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from finite_differences import assert_exact
from tiny import (
    TINY_BACKBONE,
    TINY_EPISODE,
    TINY_METHOD,
    TINY_RECIPE,
    doubles,
    initial,
    one_task,
    source_for,
    tiny_learner,
    tiny_store,
    tiny_tasks,
)
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.methods.inner_loop.base import InnerState, Inputs, adam_step
from trident.methods.trident.network import Trident
from trident.nn.parameters import Parameters, for_each_task
from trident.tasks.task import Batch, Labels

LATENTS = ("semantic", "label")
RATES = {"sgd": 1e-2, "adam": 1e-2}


def start_of(learner: InnerLoopLearner) -> Parameters:
    """Random weights in float64. Training can turn a batch norm's line upside down, so some are."""
    parameters = doubles(initial(learner.model, 1))
    for key in parameters:
        if key.endswith("norm.gain"):
            parameters[key][::2] *= -0.7
    return parameters


@pytest.mark.parametrize(
    ("optimizer", "batch_norm", "classifier_start", "semantic_batch_norm", "refinements"),
    [
        ("sgd", "transductive", "learned", "set", 0),
        pytest.param("adam", "transductive", "learned", "set", 0, marks=pytest.mark.soak),
        pytest.param("sgd", "support", "learned", "set", 0, marks=pytest.mark.soak),
        pytest.param("adam", "support", "learned", "set", 0, marks=pytest.mark.soak),
        pytest.param("sgd", "transductive", "prototypes", "set", 0, marks=pytest.mark.soak),
        ("adam", "support", "prototypes", "set", 0),
        pytest.param("sgd", "transductive", "learned", "task", 0, marks=pytest.mark.soak),
        ("adam", "transductive", "prototypes", "task", 0),
        pytest.param("sgd", "support", "learned", "task", 0, marks=pytest.mark.soak),
        ("sgd", "transductive", "prototypes", "set", 2),
        pytest.param("sgd", "transductive", "prototypes", "task", 2, marks=pytest.mark.soak),
        pytest.param("adam", "transductive", "prototypes", "set", 2, marks=pytest.mark.soak),
        pytest.param("adam", "support", "prototypes", "task", 2, marks=pytest.mark.soak),
    ],
)
def test_meta_gradient_against_finite_differences(
    optimizer: str, batch_norm: str, classifier_start: str, semantic_batch_norm: str, refinements: int
) -> None:
    learner = tiny_learner(
        batch_norm,
        inner_optimizer=optimizer,
        inner_rate=RATES[optimizer],
        inner_steps=3,
        classifier_start=classifier_start,
        semantic_batch_norm=semantic_batch_norm,
        refinements=refinements,
    )
    published = semantic_batch_norm == "set" and not refinements
    assert_exact(learner, start_of(learner), tiny_tasks(), directions=4 if published else 2)


@pytest.mark.parametrize("semantic_batch_norm", ["set", "task"])
@pytest.mark.parametrize("refinements", [0, 2])
def test_without_inner_steps_the_gradient_is_exact_too(semantic_batch_norm: str, refinements: int) -> None:
    learner = tiny_learner(
        inner_steps=0,
        classifier_start="prototypes",
        semantic_batch_norm=semantic_batch_norm,
        refinements=refinements,
    )
    assert_exact(learner, start_of(learner), tiny_tasks())


@pytest.mark.parametrize(
    ("start", "batch_norm", "refinements"), [("learned", "transductive", 0), ("prototypes", "support", 1)]
)
def test_the_gradient_is_exact_with_unlabelled_images_in_the_inner_steps(
    start: str, batch_norm: str, refinements: int
) -> None:
    changed = {"inner_steps": 2, "classifier_start": start, "refinements": refinements, "unlabelled_weight": 0.5}
    learner = tiny_learner(batch_norm, **changed)
    shapes = learner.model.noise_shapes(TINY_EPISODE, 1)
    generator = torch.Generator().manual_seed(9)
    batch = tiny_tasks()
    noise = {name: torch.randn(2, *shape, generator=generator).double() for name, shape in shapes.items()}
    batch = Batch(replace(batch.task, noise=noise), batch.labels)
    assert {name for name in shapes if "step" in name} == {f"query/step{i}/{of}" for i in (0, 1) for of in LATENTS}
    assert_exact(learner, start_of(learner), batch)


def test_unlabelled_images_change_what_is_adapted_to() -> None:
    # Without AttFEX and with batch norm's statistics of the support set, only the loss can bring queries in.
    without, with_them = (
        tiny_learner("support", attfex="off", inner_steps=2, unlabelled_weight=weight) for weight in (0.0, 0.5)
    )
    shapes = with_them.model.noise_shapes(TINY_EPISODE, 1)
    task = replace(tiny_tasks().task, noise={name: torch.zeros(2, *shape).double() for name, shape in shapes.items()})
    images = task.images.clone()
    images[:, task.queries] = images[:, task.queries].flip(2)  # other queries
    parameters = start_of(without)
    for learner, same in ((without, True), (with_them, False)):
        one, other = (learner.adapted(parameters, replace(task, images=of)) for of in (task.images, images))
        assert torch.equal(one["semantic_encoder.0.weight"], other["semantic_encoder.0.weight"]) == same


@pytest.mark.parametrize("inner_steps", [0, 2])
def test_the_gradient_is_exact_if_z_label_is_inferred_from_the_image_alone(inner_steps: int) -> None:
    learner = tiny_learner(inner_steps=inner_steps, classifier_start="prototypes", label_reads_semantic=False)
    assert_exact(learner, start_of(learner), tiny_tasks())


def test_the_gradient_is_exact_with_a_penalty_on_correlated_latents() -> None:
    learner = tiny_learner(inner_steps=2, decorrelation_weight=5.0)
    assert_exact(learner, start_of(learner), tiny_tasks())


class OnlyTheClassifier(Trident):
    """Adapts the classifier alone, as ANIL does (Raghu et al. 2020)."""

    def adapts(self, parameter: str) -> bool:
        return parameter.startswith("classifier.")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("classifier_start", ["learned", "prototypes"])
def test_a_method_may_leave_parameters_out_of_its_inner_steps(optimizer: str, classifier_start: str) -> None:
    """They keep their values, and the meta-gradient is exact, theirs too."""
    own = {entry.name: getattr(TINY_METHOD, entry.name) for entry in fields(TINY_METHOD)}
    own |= {"inner_optimizer": optimizer, "inner_rate": RATES[optimizer], "inner_steps": 3}
    method = OnlyTheClassifier(**own | {"classifier_start": classifier_start})
    learner = InnerLoopLearner(method.model(TINY_BACKBONE, TINY_EPISODE))
    parameters, batch = start_of(learner), tiny_tasks()
    (before, _), *_, (after, _) = learner.adapt(parameters, batch.task)
    for key, value in before.items():
        assert torch.equal(after[key], value) != key.startswith(("classifier.0.", "classifier.1.")), key
    assert_exact(learner, parameters, batch)
    gradient = learner.gradient(parameters, batch).gradient
    assert all(bool(gradient[key].any()) for key in ("backbone.0.weight", "decoder.0.weight", "label.loc.weight"))


def test_a_wider_label_encoder_and_a_head_for_all_training_classes() -> None:
    learner = tiny_learner(
        channels=7,
        semantic_channels=4,
        training_classes=9,
        classifier_start="prototypes",
        inner_rate=RATES["sgd"],
        inner_steps=2,
        refinements=1,
    )
    parameters, batch = doubles(initial(learner.model, 1)), tiny_tasks()
    assert parameters["backbone.0.bias"].shape == (7,)
    assert parameters["semantic_encoder.0.bias"].shape == (4,)
    classes = torch.randint(0, 9, batch.labels.queries.shape, generator=torch.Generator().manual_seed(3))
    with_classes = batch._replace(labels=Labels(batch.labels.queries, classes))
    assert_exact(learner, parameters, with_classes)
    assert learner.gradient(parameters, with_classes).losses["training_class"].all()
    without = learner.gradient(parameters, batch)
    assert not without.gradient["training_classes.weight"].any()
    assert not without.losses["training_class"].any()


def test_meta_gradient_is_that_of_the_unrolled_loop() -> None:
    """Plain autograd through all inner steps at once, the definition of MAML, gives the same."""
    learner = tiny_learner(inner_rate=1e-2, inner_steps=3)
    start, (task, labels) = doubles(initial(learner.model, 1)), tiny_tasks()
    statistics = learner.statistics(task)
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    current = for_each_task(leaves, task.n_tasks)
    for step in range(3):
        loss = learner.model.loss(current, Inputs(task, statistics, "support", draw=step)).losses["total"]
        inner = torch.autograd.grad(loss.sum(), list(current.values()), create_graph=True, materialize_grads=True)
        current = {key: value - 1e-2 * g for (key, value), g in zip(current.items(), inner, strict=True)}
    loss = learner.model.loss(current, Inputs(task, statistics, labels=labels)).losses["total"]
    expected = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
    actual = learner.gradient(start, Batch(task, labels)).gradient
    for key, value in zip(leaves, expected, strict=True):
        torch.testing.assert_close(actual[key], value)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_many_tasks_at_once_are_as_one_after_the_other(optimizer: str) -> None:
    learner = tiny_learner(inner_optimizer=optimizer, inner_rate=RATES[optimizer], inner_steps=3)
    parameters, batch = doubles(initial(learner.model, 1)), tiny_tasks(n_tasks=4)
    together = learner.gradient(parameters, batch)
    apart = [learner.gradient(parameters, one_task(batch, index)) for index in range(4)]
    for key, value in together.gradient.items():
        torch.testing.assert_close(value, sum(single.gradient[key] for single in apart))
    for name, part in together.losses.items():
        torch.testing.assert_close(part, torch.cat([single.losses[name] for single in apart]))
    torch.testing.assert_close(together.accuracy, torch.cat([single.accuracy for single in apart]))
    for key, value in together.statistics.items():
        torch.testing.assert_close(value, torch.cat([single.statistics[key] for single in apart]))


@pytest.mark.parametrize("poisoned", ["support/1/label", "query/0/label"])
@pytest.mark.parametrize("classifier_start", ["learned", "prototypes"])
def test_a_task_that_blows_up_is_left_out_and_spoils_nothing_else(poisoned: str, classifier_start: str) -> None:
    learner = tiny_learner(inner_rate=1e-2, inner_steps=2, classifier_start=classifier_start)
    parameters = doubles(initial(learner.model))
    batch = tiny_tasks(3, inner_steps=2)
    batch.task.noise[poisoned][1] = float("inf")
    found = learner.gradient(parameters, batch)
    assert found.finite.tolist() == [True, False, True]
    apart = [learner.gradient(parameters, one_task(batch, task)).gradient for task in (0, 2)]
    for key, value in found.gradient.items():
        torch.testing.assert_close(value, apart[0][key] + apart[1][key], rtol=1e-4, atol=1e-4)


def test_a_gradient_that_blows_up_counts_though_the_loss_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = InnerLoopLearner._pull_back

    def overflowing(learner: InnerLoopLearner, pulled: Parameters, *rest: Any) -> Any:
        found, moments = pull(learner, pulled, *rest)
        for value in found.values():
            value[1] = float("inf")
        return found, moments

    monkeypatch.setattr(InnerLoopLearner, "_pull_back", overflowing)
    learner = tiny_learner(inner_rate=1e-2, inner_steps=1)
    found = learner.gradient(doubles(initial(learner.model)), tiny_tasks(3, inner_steps=1))
    assert bool(found.losses["total"].isfinite().all())
    assert found.finite.tolist() == [True, False, True]
    assert all(bool(value.isfinite().all()) for value in found.gradient.values())


def test_first_order_stops_at_the_adapted_parameters() -> None:
    learner = tiny_learner(inner_rate=1e-2, inner_steps=3, inner_order="first")
    parameters, batch = doubles(initial(learner.model, 1)), tiny_tasks()
    task, labels = batch
    adapted = {key: value.requires_grad_() for key, value in learner.adapt(parameters, task)[-1][0].items()}
    loss = learner.model.loss(adapted, Inputs(task, learner.statistics(task), labels=labels)).losses["total"]
    expected = torch.autograd.grad(loss.sum(), list(adapted.values()), materialize_grads=True)
    actual = learner.gradient(parameters, batch).gradient
    for key, value in zip(adapted, expected, strict=True):
        torch.testing.assert_close(actual[key], value.sum(0))
    second = tiny_learner(inner_rate=1e-2, inner_steps=3).gradient(parameters, batch).gradient
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
        parameters, state = adam_step(parameters, state, {"x": gradient}, step, 1e-2)
        torch.testing.assert_close(parameters["x"], leaf.detach())


def test_adaptation_lowers_the_support_loss() -> None:
    recipe = replace(TINY_RECIPE, method=replace(TINY_METHOD, inner_steps=5))
    learner = tiny_learner(inner_steps=5)
    task, _ = source_for(recipe, tiny_store()).batch(range(4))
    same = {f"support/{step}/{latent}": task.noise[f"support/0/{latent}"] for step in range(5) for latent in LATENTS}
    task = replace(task, noise={**task.noise, **same})
    trajectory = learner.adapt(recipe.initial(0), task)
    assert len(trajectory) == 6
    with torch.no_grad():
        before, after = (
            learner.model.loss(entry, Inputs(task, learner.statistics(task), "support")).losses["total"]
            for entry, _ in (trajectory[0], trajectory[-1])
        )
    assert bool((after < before).all())


MEASURE = """
import resource, sys
from trident.data.glyphs import open_glyphs
from trident.engines.execution import Execution, make_learner
from trident.learning.step_gradient import training_source
from trident.recipes.loading import load_recipe
recipe = load_recipe("glyphs", [f"method.inner_steps={sys.argv[1]}"])
learner = make_learner(recipe, Execution())
batch = training_source(recipe, open_glyphs(), "cpu").batch(range(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
learner.gradient(recipe.initial(0), batch)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_the_inner_steps() -> None:
    """Peak memory of the meta-gradient alone, measured in processes of their own, on real glyph tasks."""

    def peak(steps: int) -> int:
        call = [sys.executable, "-c", MEASURE, str(steps)]
        # The least of three: how much an allocator keeps varies by a tenth between runs.
        return min(int(subprocess.run(call, capture_output=True, text=True, check=True).stdout) for _ in range(3))

    assert peak(10) <= 1.2 * peak(2)
