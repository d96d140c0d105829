"""Stein variational gradient descent, and Bayesian MAML with it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from adapted_conv4 import learner_of, tasks_for
from tiny import one_task
from trident.methods.inner_loop.adapted_conv4 import SUPPORT_FEATURES
from trident.methods.inner_loop.bmaml import PARTICLES, BayesianMamlModel, svgd_direction


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
    assert isinstance(learner.model, BayesianMamlModel)
    queries, _ = learner.model.features(before, learner.inputs(batch.task))
    probabilities = [F.softmax(F.linear(queries[0], w[:-3].view(3, -1), w[-3:]), 1) for w in after[PARTICLES][0]]
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
