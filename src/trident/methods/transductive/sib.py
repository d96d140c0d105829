"""SIB, the Synthetic Information Bottleneck (Hu et al. 2020): predicted gradients move the class weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadModel, Parameters, Task, setting, tunable
from trident.methods.transductive.synthetic_gradients import LAYERS, FixedShapeHead, scaled_and_shifted, turning
from trident.nn.classes import class_means, length_of
from trident.nn.linear import Linear, linear

HIDDEN = 8  # hidden units of the network, as a multiple of the number of classes


@dataclass(frozen=True)
class SyntheticInformationBottleneck(FixedShapeHead):
    """Class weights take a few gradient steps on the queries. A network predicts the gradient: there are no labels.

    Learned: the network, the start vector a, a scale s and a shift b; the backbone too, unless it is frozen, as
    published. All features f have unit length. At test, for the queries x_i of a task:

        w_c     =  a * mean of f over the support images of c                 element by element
        l_ic    =  s (cos(f_i, w_c) + b)
        w_c    <-  w_c - rate * d/dw_c  sum_i sum_c g_ic l_ic,    g_i = network(l_i)    not part of the derivative

    several times, and then p(y = c | x_i) ~ exp(l_ic). The network has two hidden layers with ReLU and batch norm,
    whose statistics are always those of the task's queries. Its inputs and outputs are places of classes: classes in
    another order change the predictions a little, and weights take the number of classes that they were trained with.
    Classes are drawn in random order in training, so no place means anything.
    """

    about = About(
        "Synthetic Information Bottleneck",
        "Hu et al. 2020",
        "Empirical Bayes Transductive Meta-Learning with Synthetic Gradients",
        transductive=True,
        any_way=False,
    )
    steps: int = tunable(3, "synthetic gradient steps", most=10_000, least=0)
    rate: float = tunable(1e-3, "learning rate of these steps", above=0)
    initial_scale: float = setting(10.0, "start of the learned scale s of cosines", above=0)

    def initial_on(self, model: HeadModel, generator: torch.Generator) -> Parameters:
        n_way, hidden = model.episode.n_way, HIDDEN * model.episode.n_way
        sizes = [(n_way, hidden), (hidden, hidden), (hidden, n_way)]
        start = {
            "start": torch.ones(model.n_features),
            "scale": torch.tensor(self.initial_scale),
            "shift": torch.tensor(0.0),
        }
        for layer in LAYERS:
            start |= Linear(f"network.{layer}", *sizes[layer]).initial(generator)
        for name in ("network.0.norm", "network.1.norm"):
            start |= {f"{name}.weight": torch.ones(hidden), f"{name}.bias": torch.zeros(hidden)}
        return model.backbone.initial(generator) | start

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self.normalised(parameters, features)
        queries = features[:, task.queries]
        scale, shift = parameters["scale"], parameters["shift"]
        weights = parameters["start"] * class_means(features[:, task.support], task.support_labels, task.n_way)
        for step in range(self.steps + 1):
            lengths = length_of(weights)  # (task, n_way, 1)
            directions = weights / lengths
            logits = scale * (queries @ directions.mT + shift)  # (task, query, n_way)
            if step < self.steps:
                pull = scale * self.network(parameters, logits).mT @ queries  # (task, n_way, feature)
                weights = weights - self.rate * turning(pull, directions, lengths)
        return logits

    def network(self, parameters: Parameters, logits: Tensor) -> Tensor:
        """The synthetic gradient: (task, query, n_way) -> the same shape."""
        values = logits
        for name in ("network.0", "network.1"):
            values = F.relu(linear(parameters, name, values))
            variance, mean = torch.var_mean(values, 1, correction=0, keepdim=True)
            values = scaled_and_shifted(parameters, name, (values - mean) / (variance + 1e-5).sqrt())
        return linear(parameters, "network.2", values)
