"""VAMPIRE (Nguyen, Do & Carneiro 2020): MAML with a Gaussian over the weights."""

from dataclasses import dataclass

from trident.methods.base import About
from trident.methods.inner_loop.variational_weights import VariationalWeights


@dataclass(frozen=True)
class Vampire(VariationalWeights):
    """MAML with a Gaussian over the weights in the place of the weights.

    Learned: the mean and the variance of every weight of a Conv4 and of a linear layer on its features. At test both
    take gradient steps on the support set, then the predictions of weights sampled from the Gaussian q are averaged.
    Training minimises the same loss of the queries, after the steps:

        E_q[cross-entropy] + kl_weight KL(q || N(0, I)),   the expectation by samples w = mean + std * noise

    Differences from the published method: the Conv4 has batch norm, whose gains and shifts are random like all
    weights; steps are taken on the logarithm of the variance.
    """

    about = About(
        "VAMPIRE",
        "Nguyen, Do & Carneiro 2020",
        "Uncertainty in Model-Agnostic Meta-Learning using Variational Inference",
        any_way=False,
    )
