"""The Bayesian and variational heads, and random tasks for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from ablation_grids import Answer
from tiny import initial
from trident.backbones.frozen import FrozenBackbone
from trident.methods.base import HeadModel, HeadOnFeatures
from trident.methods.bayesian.abpml import BayesianPrototypes
from trident.methods.bayesian.dkt import DeepKernelTransfer
from trident.methods.bayesian.logistic_softmax_gp import LogisticSoftmaxProcess
from trident.methods.bayesian.metaqda import MetaQda
from trident.methods.bayesian.ove_polya_gamma import OveGaussianProcess
from trident.methods.bayesian.versa import Versa
from trident.methods.transductive.sib import SyntheticInformationBottleneck
from trident.methods.transductive.ssr import SelfSupervisedReranking
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec
from trident.tasks.task import Labels, Task

Array = np.ndarray
Here = Callable[..., Answer]
N_WAY, N_FEATURES, N_QUERIES = 3, 8, 5
SUPPORT = [0, 1, 1, 2, 2, 0, 1]  # unequal shots, in no order
EPISODE = EpisodeSpec(N_WAY, 1, 1)
HEADS: dict[str, HeadOnFeatures] = {
    "versa": Versa(width=4, samples=3),
    "dkt": DeepKernelTransfer(),
    "ove, marginal": OveGaussianProcess(rounds=60),
    "ove, predictive": OveGaussianProcess(objective="predictive", rounds=4),
    "logistic-softmax, marginal": LogisticSoftmaxProcess(rounds=100),
    "logistic-softmax, predictive": LogisticSoftmaxProcess(objective="predictive", rounds=4),
    "sib": SyntheticInformationBottleneck(rate=0.1),
    # Not CL2N: no gradient goes through the mean of the training features.
    "metaqda": MetaQda(normalisation="L2N", dimensions=5),
    "abpml": BayesianPrototypes(initial_log_var=-1.0),
    "ssr": SelfSupervisedReranking(rate=0.1, width=6, steps=2),
}
heads = pytest.mark.parametrize("name", list(HEADS))


@dataclass(frozen=True)
class Case:
    """A batch of tasks of random features, and random weights of a head for it."""

    features: Tensor
    task: Task
    labels: Labels
    parameters: Parameters

    def of_task(self, index: int) -> tuple[Array, Array, Array, Array]:
        """Support features, their labels, query features and their labels."""
        n, rows = self.task.n_support, self.features[index].numpy()
        return rows[:n], self.task.support_labels[index].numpy(), rows[n:], self.labels.queries[index].numpy()


def case_of(head: HeadOnFeatures, draws: int = 2, size: int = N_FEATURES, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    episode = replace(EPISODE, n_query=N_QUERIES)
    model = head.model(FrozenBackbone(size=size), episode)
    assert isinstance(model, HeadModel)
    parameters = {key: value.to(dtype) for key, value in (initial(model) | head.initial_statistics(size)).items()}
    parameters = {key: value + 0.2 * normal(*value.shape) for key, value in parameters.items()}
    labels = torch.tensor([SUPPORT, [0, 0, 1, 2, 0, 2, 1]])
    shapes = model.noise_shapes(replace(episode, n_way=1, n_shot=len(SUPPORT)), draws)
    noise = {name: normal(2, *shape) for name, shape in shapes.items()}
    features = 0.5 + normal(2, len(SUPPORT) + N_WAY * N_QUERIES, size)
    queries = torch.randint(N_WAY, (2, N_WAY * N_QUERIES), generator=generator)
    return Case(features, Task(features, labels, N_WAY, noise), Labels(queries), parameters)


def logits_of(head: HeadOnFeatures, case: Case) -> Tensor:
    features = case.features[:, :, None] if head.takes_cells else case.features
    return head.head(case.parameters, features, case.task)


def assert_same_probabilities(found: Tensor, expected: Array, tolerance: float = 1e-9) -> None:
    """Of one task: logits and the logarithms of probabilities, which may differ by a constant for each query."""
    actual = torch.log_softmax(found, -1).numpy()
    wanted = expected - scipy.special.logsumexp(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance)


def unit(row: Array) -> Array:
    return np.asarray(row / math.sqrt(float(np.sum(row**2))))
