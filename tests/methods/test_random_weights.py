"""Methods with a Gaussian over all weights: divergences, samples, and the parts of their losses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapted_conv4 import RANDOM_WEIGHTS, images_of, learner_of, plain_adaptation, plain_network, tasks_for
from tiny import initial, one_task
from trident.methods.inner_loop.abml import negative_log_hyper_prior
from trident.methods.inner_loop.platipus import QUERY_LOG_VAR
from trident.methods.inner_loop.variational_weights import LOG_VAR
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters, joined, split_as
from trident.tasks.task import Batch, Labels


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
