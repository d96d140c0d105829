"""MAML and its relatives: exact gradients, agreement with plain code, and what their predictions depend on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import (
    TINY_BACKBONE,
    TINY_EPISODE,
    TINY_RECIPE,
    Silent,
    doubles,
    initial,
    one_task,
    tiny_store,
    tiny_tasks,
)
from trident.backbones.frozen import FrozenBackbone
from trident.data.glyphs import open_glyphs
from trident.engines.execution import Execution
from trident.errors import TridentError
from trident.labelling.labeller import Labeller
from trident.learning.checkpoint import load_checkpoint
from trident.learning.inner_loop import InnerLoopLearner
from trident.learning.learners import make_learner
from trident.learning.run_start import start_run
from trident.learning.training import train, training_source
from trident.measuring.evaluate import evaluate
from trident.measuring.prediction import predict_one_by_one
from trident.measuring.validation import validate
from trident.methods.abml import Abml, negative_log_hyper_prior
from trident.methods.adapted_conv4 import SUPPORT_FEATURES, AdaptedConv4
from trident.methods.anil import Anil
from trident.methods.bmaml import PARTICLES, BayesianMaml, BayesianMamlModel
from trident.methods.boil import Boil
from trident.methods.maml import Maml
from trident.methods.platipus import QUERY_LOG_VAR, Platipus
from trident.methods.vampire import Vampire
from trident.methods.variational_weights import LOG_VAR
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters, joined, split_as
from trident.nn.svgd import svgd_direction
from trident.recipes.loading import load_recipe
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.task import Batch, Labels, Task, queries_alone

FEW: dict[str, Any] = {"inner_rate": 0.05, "inner_steps": 2, "training_inner_steps": 2}
RANDOM: dict[str, Any] = {**FEW, "initial_log_var": -4.0, "kl_weight": 1e-3}
METHODS: dict[str, AdaptedConv4] = {
    "maml": Maml(**FEW),
    "anil": Anil(**FEW),
    "boil": Boil(inner_rate=0.1),
    "abml": Abml(**RANDOM, hyper_prior_weight=1e-4),
    "vampire": Vampire(**RANDOM),
    "platipus": Platipus(**RANDOM, initial_step=0.05),
    "bmaml": BayesianMaml(**FEW, particles=4),
}
RANDOM_WEIGHTS = ("abml", "vampire", "platipus")
methods = pytest.mark.parametrize("name", list(METHODS))


def learner_of(name: str, batch_norm: str = "transductive", **settings: Any) -> tuple[InnerLoopLearner, Parameters]:
    """With random weights in float64, and random statistics of training."""
    model = replace(METHODS[name], **settings).model(TINY_BACKBONE, TINY_EPISODE)
    generator = torch.Generator().manual_seed(4)
    running = {
        key: 0.5 + torch.rand(value.shape, generator=generator, dtype=torch.float64)
        for key, value in model.initial_running().items()
    }
    return InnerLoopLearner(model, batch_norm, running), doubles(initial(model, 1))


def tasks_for(learner: InnerLoopLearner, predictions: int = 1, sampled: bool = True, seed: int = 0) -> Batch:
    """Random tasks in float64 with this learner's noise, which is zero if it is not sampled."""
    task, labels = tiny_tasks(seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    noise = {
        shape: torch.randn((task.n_tasks, *size), generator=generator, dtype=torch.float64) * float(sampled)
        for shape, size in learner.model.noise_shapes(TINY_EPISODE, predictions).items()
    }
    return Batch(replace(task, noise=noise), labels)


# The gradient.


def training_loss(learner: InnerLoopLearner, parameters: Parameters, batch: Batch) -> float:
    """The loss that training minimises, summed over the tasks, without its gradient."""
    task, labels = batch
    adapted, _ = learner._adapt(parameters, task, labels)[-1]
    with torch.no_grad():
        found = learner.model.loss(adapted, task, "query", labels, 0, learner.statistics(task))
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


# MAML against plain code.


def images_of(task: Task, index: int) -> tuple[Tensor, Tensor]:
    pixels = task.images[index].permute(0, 3, 1, 2)
    return pixels[task.support], pixels[task.queries]


def plain_network(weights: Parameters, images: Tensor) -> Tensor:
    """Conv4 and a linear layer with torch's own functions, channels first."""
    for block in range(4):
        name = f"backbone.{block}"
        images = F.conv2d(images, weights[f"{name}.weight"].permute(3, 2, 0, 1), weights[f"{name}.bias"], padding=1)
        gain, shift = weights[f"{name}.norm.gain"], weights[f"{name}.norm.shift"]
        images = F.leaky_relu(F.batch_norm(images, None, None, gain, shift, training=True), 0.2)
        images = F.max_pool2d(images, 2)
    return F.linear(images.permute(0, 2, 3, 1).flatten(1), weights["head.weight"], weights["head.bias"])


def plain_adaptation(
    start: Parameters, support: Tensor, labels: Tensor, steps: int, rate: float, moves: str, second: bool
) -> Parameters:
    weights = dict(start)
    for _ in range(steps):
        moving = {key: value for key, value in weights.items() if key.startswith(moves)}

        def loss(moving: Parameters, fixed: Parameters = weights) -> Tensor:
            return F.cross_entropy(plain_network(fixed | moving, support), labels)

        gradient = torch.func.grad(loss)(moving)
        weights |= {key: value - rate * (g if second else g.detach()) for (key, value), g in _pairs(moving, gradient)}
    return weights


def _pairs(one: Parameters, other: Parameters) -> list[tuple[tuple[str, Tensor], Tensor]]:
    return [((key, value), other[key]) for key, value in one.items()]


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


# Random weights.


def gaussians(n: int = 7) -> tuple[Gaussian, Gaussian]:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4, 2, 1, n, generator=generator, dtype=torch.float64)
    return Gaussian(values[0], values[1]), Gaussian(values[2], values[3])


def normal(gaussian: Gaussian) -> torch.distributions.Normal:
    return torch.distributions.Normal(gaussian.loc, torch.exp(gaussian.log_var / 2))


def test_divergences_are_those_of_torch() -> None:
    one, other = gaussians()
    expected = torch.distributions.kl_divergence(normal(one), normal(other)).sum(2)
    torch.testing.assert_close(one.kl_to(other), expected)
    standard = Gaussian(torch.zeros_like(one.loc), torch.zeros_like(one.loc))
    torch.testing.assert_close(one.kl_to(standard), one.kl_to_standard_normal())
    torch.testing.assert_close(one.kl_to(one), torch.zeros(2, 1, dtype=torch.float64))


def test_the_hyper_prior_is_that_of_torch_up_to_a_constant() -> None:
    one, other = gaussians()
    gamma = torch.distributions.Gamma(torch.tensor(1.0, dtype=torch.float64), 0.01)
    unit = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)

    def expected(prior: Gaussian) -> Tensor:
        means: Tensor = unit.log_prob(prior.loc)  # type: ignore[no-untyped-call]
        precisions: Tensor = gamma.log_prob(torch.exp(-prior.log_var))  # type: ignore[no-untyped-call]
        return -(means + precisions).sum(2)

    actual = negative_log_hyper_prior(one) - negative_log_hyper_prior(other)
    torch.testing.assert_close(actual, expected(one) - expected(other))


def test_rows_of_weights_and_back() -> None:
    _, parameters = learner_of("maml")
    stacked = {key: torch.stack([value, 2 * value]) for key, value in parameters.items()}
    again = split_as(joined(stacked), parameters)
    assert all(torch.equal(again[key], value) for key, value in stacked.items())
    assert joined(stacked).shape == (2, sum(value.numel() for value in parameters.values()))


@pytest.mark.parametrize("name", RANDOM_WEIGHTS)
def test_without_noise_the_mean_weights_predict(name: str) -> None:
    """As MAML with the same steps does, where KL has no weight; so many draws are as one."""
    learner, parameters = learner_of(name, kl_weight=0.0)
    task = tasks_for(learner, sampled=False).task
    maml, _ = learner_of("maml")
    means = {key: parameters[key] for key in initial(maml.model)}
    predicted = learner.log_probabilities(parameters, task)
    if name == "platipus":  # one step more, of its own size
        steps = maml.adapt(means, task)
        means_of_tasks = [{key: value[i] for key, value in steps[1][0].items()} for i in range(2)]
        expected = torch.cat(
            [
                maml.log_probabilities(means_of_tasks[i], one_task(Batch(task, Labels(task.support_labels)), i).task)
                for i in range(2)
            ]
        )
    else:
        expected = maml.log_probabilities(means, task)
    torch.testing.assert_close(predicted, expected)
    several = learner.log_probabilities(parameters, tasks_for(learner, predictions=3, sampled=False).task)
    torch.testing.assert_close(several, predicted)


@pytest.mark.parametrize("name", RANDOM_WEIGHTS)
def test_an_average_is_that_of_the_samples(name: str) -> None:
    learner, parameters = learner_of(name)
    task = tasks_for(learner, predictions=3).task
    kind = "start" if name == "platipus" else "query"
    each = []
    for draw in range(3):
        others = {key: value for key, value in task.noise.items() if not key.startswith(f"task/{kind}/")}
        only = replace(task, noise=others | {f"task/{kind}/0": task.noise[f"task/{kind}/{draw}"]})
        each.append(learner.log_probabilities(parameters, only).exp())
    assert not torch.allclose(each[0], each[1])
    torch.testing.assert_close(learner.log_probabilities(parameters, task).exp(), torch.stack(each).mean(0))


@pytest.mark.parametrize("name", ["abml", "vampire"])
def test_the_loss_after_the_steps_is_made_of_its_parts(name: str) -> None:
    """KL divergences and expectations, once more with torch's distributions and plain code, for one task."""
    learner, parameters = learner_of(name)
    batch = one_task(tasks_for(learner), 0)
    found = learner.gradient(parameters, batch)
    adapted, _ = learner.adapt(parameters, batch.task)[-1]
    names = [key for key in parameters if not key.startswith(LOG_VAR)]
    spread = {key: torch.exp(adapted[LOG_VAR + key][0] / 2) for key in names}
    noise = batch.task.noise["task/query/0"][0]
    classification, kl = [], torch.tensor(0.0, dtype=torch.float64)
    for row in noise:
        own = split_as(row[None], {key: parameters[key] for key in names})
        weights = {key: adapted[key][0] + spread[key] * own[key][0] for key in names}
        logits = plain_network(weights, images_of(batch.task, 0)[1])
        classification.append(F.cross_entropy(logits, batch.labels.queries[0]))
    for key in names:
        posterior = torch.distributions.Normal(adapted[key][0], spread[key])
        prior = torch.distributions.Normal(parameters[key], torch.exp(parameters[LOG_VAR + key] / 2))
        if name == "vampire":
            prior = torch.distributions.Normal(torch.zeros_like(spread[key]), torch.ones_like(spread[key]))
        kl = kl + torch.distributions.kl_divergence(posterior, prior).sum()
    torch.testing.assert_close(found.losses["classification"][0], torch.stack(classification).mean())
    torch.testing.assert_close(found.losses["kl"][0], 1e-3 * kl)
    parts = [value for key, value in found.losses.items() if key != "total"]
    torch.testing.assert_close(found.losses["total"], torch.stack(parts).sum(0))
    assert len(parts) == (3 if name == "abml" else 2)


def test_platipus_starts_from_the_queries_in_training_only() -> None:
    """Once more in plain code, for one task: the start, the steps, the loss."""
    learner, parameters = learner_of("platipus")
    batch = one_task(tasks_for(learner), 0)
    found = learner.gradient(parameters, batch)
    means = {key: parameters[key] for key in initial(learner_of("maml")[0].model)}
    (support, queries), labels = images_of(batch.task, 0), batch.labels.queries[0]

    def row(values: Parameters, prefix: str = "") -> Tensor:
        return torch.cat([values[prefix + key].flatten() for key in means])

    by_support = row(plain_adaptation(means, support, batch.task.support_labels[0], 1, 0.05, "", False))
    by_queries = row(plain_adaptation(means, queries, labels, 1, 0.05, "", False))
    start = by_queries + torch.exp(row(parameters, QUERY_LOG_VAR) / 2) * batch.task.noise["task/start/0"][0, 0]
    weights = {key: value[0] for key, value in split_as(start[None], means).items()}
    weights = plain_adaptation(weights, support, batch.task.support_labels[0], 2, 0.05, "", False)
    torch.testing.assert_close(
        found.losses["classification"][0], F.cross_entropy(plain_network(weights, queries), labels)
    )
    posterior = torch.distributions.Normal(by_queries, torch.exp(row(parameters, QUERY_LOG_VAR) / 2))
    prior = torch.distributions.Normal(by_support, torch.exp(row(parameters, LOG_VAR) / 2))
    expected = 1e-3 * torch.distributions.kl_divergence(posterior, prior).sum()
    torch.testing.assert_close(found.losses["kl"][0], expected, rtol=1e-5, atol=0)


# Particles.


def transcribed_direction(particles: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Liu & Wang's update with loops, for one task."""
    n = len(particles)
    squared = [[np.sum((a - b) ** 2) for b in particles] for a in particles]
    pairs = sorted(squared[p][r] for p in range(n) for r in range(p + 1, n))
    h = pairs[(len(pairs) - 1) // 2] / math.log(n)
    direction = np.zeros_like(particles)
    for p in range(n):
        for r in range(n):
            k = math.exp(-squared[r][p] / h)
            direction[p] += (k * gradient[r] - 2 / h * (particles[r] - particles[p]) * k) / n
    return direction


@pytest.mark.parametrize("n", [2, 3, 5])
def test_svgd_is_its_equation(n: int) -> None:
    generator = np.random.default_rng(n)
    particles, gradient = generator.normal(size=(2, 3, n, 6))
    actual = svgd_direction(torch.from_numpy(particles), torch.from_numpy(gradient))
    expected = np.stack([transcribed_direction(*task) for task in zip(particles, gradient, strict=True)])
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10)


def test_equal_particles_are_finite() -> None:
    particles = torch.ones(1, 3, 4)
    assert bool(svgd_direction(particles, torch.randn(1, 3, 4)).isfinite().all())


def test_svgd_samples_a_gaussian() -> None:
    """Particles that start together end with the mean and the spread of the distribution that they are drawn to."""
    generator = torch.Generator().manual_seed(0)
    particles = 0.1 * torch.randn(1, 40, 1, generator=generator, dtype=torch.float64)
    for _ in range(600):
        particles = particles + 0.5 * svgd_direction(particles, -(particles - 3) / 4)  # N(3, 4)
    assert abs(float(particles.mean()) - 3) < 0.1
    assert abs(float(particles.std()) - 2) < 0.3


def test_particles_take_steps_of_the_posterior() -> None:
    """One step of Bayesian MAML in plain code, for one task."""
    learner, parameters = learner_of("bmaml", inner_steps=1)
    batch = one_task(tasks_for(learner), 0)
    (before, _), (after, _) = learner.adapt(parameters, batch.task)
    features = before[SUPPORT_FEATURES][0]
    gradients = []
    for particle in parameters[PARTICLES]:
        own = particle.clone().requires_grad_()
        logits = F.linear(features, own[:-3].view(3, -1), own[-3:])
        prior = torch.distributions.Normal(torch.zeros_like(own), 1.0).log_prob(own)  # type: ignore[no-untyped-call]
        likelihood = -F.cross_entropy(logits, batch.task.support_labels[0], reduction="sum")
        gradients.append(torch.autograd.grad(likelihood + prior.sum(), own)[0])
    direction = transcribed_direction(parameters[PARTICLES].numpy(), torch.stack(gradients).numpy())
    expected = parameters[PARTICLES].numpy() + 0.05 * direction
    np.testing.assert_allclose(after[PARTICLES][0].numpy(), expected, rtol=1e-8)
    probabilities = [
        F.softmax(F.linear(learner.encode(parameters, batch.task)["features"][0, 6:], w[:-3].view(3, -1), w[-3:]), 1)
        for w in after[PARTICLES][0]
    ]
    found = learner.log_probabilities(parameters, batch.task)[0].exp()
    torch.testing.assert_close(found, torch.stack(probabilities).mean(0))


def test_the_chaser_loss_is_the_distance_from_a_fixed_leader() -> None:
    learner, parameters = learner_of("bmaml", chaser=True, leader_steps=2)
    batch = tasks_for(learner)
    found = learner.gradient(parameters, batch)
    assert isinstance(learner.model, BayesianMamlModel)
    assert set(found.losses) == {"total", "classification"}
    # With the leader as a fixed goal, plain autograd through all steps gives the same.
    task, labels = batch
    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    each = {key: value.expand(2, *value.shape) for key, value in leaves.items()}
    sets = [
        learner.model.backbone(each, task, learner.statistics(task), rows)[0] for rows in (task.support, task.queries)
    ]
    support, queries = (maps.flatten(2) for maps in sets)
    particles = each[PARTICLES]
    for _ in range(2):
        loss = learner.model.negative_log_posterior(particles, support, task.support_labels).sum()
        (gradient,) = torch.autograd.grad(loss, [particles], create_graph=True)
        particles = particles + 0.05 * svgd_direction(particles, -gradient)
    both, truth = torch.cat([support, queries], 1).detach(), torch.cat([task.support_labels, labels.queries], 1)
    leader = particles.detach()
    for _ in range(2):
        leader = leader.requires_grad_()
        (gradient,) = torch.autograd.grad(learner.model.negative_log_posterior(leader, both, truth).sum(), [leader])
        leader = (leader + 0.005 * svgd_direction(leader, -gradient)).detach()
    distances = (particles - leader).square().sum((1, 2))
    torch.testing.assert_close(found.losses["total"], distances.detach())
    expected = torch.autograd.grad(distances.sum(), list(leaves.values()), materialize_grads=True)
    for key, value in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found.gradient[key], value, rtol=1e-6, atol=1e-9)


# What predictions depend on.


@methods
@pytest.mark.parametrize("batch_norm", ["transductive", "support", "running"])
def test_the_order_of_images_changes_nothing(name: str, batch_norm: str) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner, predictions=2).task
    generator = torch.Generator().manual_seed(1)
    support = torch.randperm(task.n_support, generator=generator)
    query = torch.randperm(task.n_queries, generator=generator)
    images = task.images[:, torch.cat([support, task.n_support + query])]
    other = Task(images, task.support_labels[:, support], task.n_way, task.noise)
    expected = learner.log_probabilities(parameters, task)[:, query]
    torch.testing.assert_close(learner.log_probabilities(parameters, other), expected, rtol=1e-8, atol=1e-8)


@methods
@pytest.mark.parametrize("batch_norm", ["support", "running"])
def test_each_query_is_classified_for_itself(name: str, batch_norm: str) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner).task
    alone = task.with_images(task.images[:, : task.n_support + 1])
    first = learner.log_probabilities(parameters, task)[:, :1]
    torch.testing.assert_close(learner.log_probabilities(parameters, alone), first, rtol=1e-8, atol=1e-8)


@methods
@pytest.mark.parametrize("batch_norm", ["transductive", "support", "running"])
def test_queries_alone_share_one_adaptation(name: str, batch_norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner, predictions=2).task
    each = [queries_alone(task, index, range(task.n_queries)) for index in range(task.n_tasks)]
    expected = torch.stack([learner.log_probabilities(parameters, one)[:, 0] for one in each])
    adapted: list[Task] = []
    adapt = InnerLoopLearner.adapt

    def counted(self: InnerLoopLearner, parameters: Parameters, task: Task) -> Any:
        adapted.append(task)
        return adapt(self, parameters, task)

    monkeypatch.setattr(InnerLoopLearner, "adapt", counted)
    found = predict_one_by_one(learner, parameters, task, at_once=2)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert len(adapted) == task.n_tasks


@methods
def test_query_labels_reach_the_training_loss_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, parameters = learner_of(name)
    task, labels = tasks_for(learner)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a prediction may not start as training does")

    expected = learner.log_probabilities(parameters, task)
    monkeypatch.setattr(type(learner.model), "training_start", refuse)
    torch.testing.assert_close(learner.log_probabilities(parameters, task), expected, rtol=0, atol=0)
    monkeypatch.undo()
    one, other = (
        learner.gradient(parameters, Batch(task, Labels(truth))) for truth in (labels.queries, 2 - labels.queries)
    )
    assert not torch.allclose(one.losses["total"], other.losses["total"])


@methods
def test_weights_are_for_one_number_of_classes(name: str) -> None:
    method = METHODS[name]
    assert not method.any_way and not method.positional
    with pytest.raises(TridentError, match="classify 5 ways, not 4"):
        method.check_episode(EpisodeSpec(5), EpisodeSpec(4))
    method.check_episode(EpisodeSpec(5, 1, 10), EpisodeSpec(5, 3, 2))


@methods
def test_features_of_other_backbones_are_refused(name: str) -> None:
    with pytest.raises(TridentError, match="needs pictures and the conv4 backbone"):
        METHODS[name].model(FrozenBackbone(), TINY_EPISODE)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Maml(training_inner_steps=-1), "method.training_inner_steps is -1: 0 or more"),
        (lambda: Vampire(inner_steps=0), "method.inner_steps is 0: 1 or more"),
        (lambda: Vampire(samples=0), "method.samples is 0: 1 or more"),
        (lambda: Abml(kl_weight=-1.0), "method.kl_weight is -1.0: 0 or more"),
        (lambda: Platipus(initial_step=0.0), "method.initial_step is 0.0: it must be above 0"),
        (lambda: BayesianMaml(particles=1), "method.particles is 1: 2 or more"),
        (lambda: BayesianMaml(inner_optimizer="adam"), "particles take plain steps only"),
    ],
)
def test_settings_that_make_no_sense(make: Any, said: str) -> None:
    with pytest.raises(TridentError, match=said):
        make()


# The whole library with them.


GOLDEN = {  # loss on the queries in training, and probability of the right class at test
    "maml": (1.479985, 0.252618),
    "anil": (1.665967, 0.201411),
    "boil": (1.759376, 0.200194),
    "abml": (1.555586, 0.241188),
    "vampire": (1.537436, 0.241211),
    "platipus": (1.634249, 0.241031),
    "bmaml": (1.587655, 0.206861),
}


@methods
def test_golden_numbers(name: str) -> None:
    """On two tasks of real glyphs, from random weights, in float64: they change only if the method does."""
    recipe = load_recipe(f"glyphs-{name}", ["backbone.channels=8"])
    recipe = recipe.in_training()
    learner = make_learner(recipe, Execution())
    task, labels = training_source(recipe, open_glyphs(), "cpu").batch(range(2))
    noise = {key: value.double() for key, value in task.noise.items()}
    task = replace(task, images=task.images.double() / 255, noise=noise)
    parameters = doubles(recipe.initial(0))
    loss = float(learner.gradient(parameters, Batch(task, labels)).losses["total"].mean())
    right = learner.log_probabilities(parameters, task).exp().gather(2, labels.queries[:, :, None])
    assert (loss, float(right.mean())) == pytest.approx(GOLDEN[name], rel=1e-5)


@methods
def test_they_are_trained_measured_and_label_piles(name: str, tmp_path: Path) -> None:
    """Samples and means of weights too; each query alone; and with the statistics of training."""
    training = replace(TINY_RECIPE.training, steps=2, validate_every=2, save_every=2, validation_tasks=2)
    recipe, store = replace(TINY_RECIPE, method=METHODS[name], training=training), tiny_store()
    run = tmp_path / "run"
    train(start_run(recipe, store, "noise", run, "cpu"), store, run, "cpu", Silent(), validate)
    checkpoint = load_checkpoint(run)
    accuracies = [
        evaluate(checkpoint, store, protocol, split="test", tasks=2, seed=0).predictions.log_probabilities
        for protocol in (
            Protocol(latents="mean"),
            Protocol(latents="average", latent_samples=2),
            Protocol(latents="mean", queries_at_once="one", batch_norm="running"),
            Protocol(latents="mean", batch_norm="running"),
        )
    ]
    assert np.allclose(accuracies[0], accuracies[1]) == (name not in RANDOM_WEIGHTS)
    np.testing.assert_allclose(accuracies[2], accuracies[3], atol=1e-3)
    images, labels = store.images[:6], np.array([0, 0, 1, 1, 2, 2])
    labeller = Labeller(checkpoint, ("a", "b", "c"), images, labels)
    found = labeller.probabilities(store.images[6:10])
    np.testing.assert_allclose(found.sum(1), 1)
    assert labeller.probabilities_alone(store.images[6:8]).shape == (2, 3)
