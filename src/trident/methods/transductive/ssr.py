"""Self-supervised re-ranking, SSR (Shen et al. 2021): class means and queries move by predicted gradients."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.errors import TaskSizeError
from trident.methods.base import About, HeadModel, Parameters, Task, setting, tunable
from trident.methods.transductive.synthetic_gradients import LAYERS, FixedShapeHead, scaled_and_shifted, turning
from trident.nn.classes import class_means, length_of, span_coordinates
from trident.nn.linear import Linear, linear

UPDATES = ("prototypes", "queries")  # each has a network of its own


@dataclass(frozen=True)
class SelfSupervisedReranking(FixedShapeHead):
    """Prototypes and queries are moved by synthetic gradients of their similarities, so that neighbours get closer.

    Learned: two networks and a scale s; the backbone too, unless it is frozen, as published. At test the prototypes of
    the N classes (mean support features) and the M queries take turns. In each turn, with the cosines A of all N + M
    vectors v (prototypes first):

        order     for each vector r:  r itself, then the prototypes, then the queries, both by falling cosine with r
        u_r       the cosines between the first 1 + N of this order and all that come after each of them
        g_r       network(u_r), as if it were the derivative of a loss by u_r
        v        <-  v - rate * sum over r of  (d u_r / d v)^T g_r       for the prototypes in one turn, for the
                                                                          queries in the other

    and at last p(y = c | x) ~ exp(s cos(query, prototype c)). The input of the networks has a fixed size,
    (N + M)(N + M + 1)/2 - M(M - 1)/2: weights take one number of classes and of queries. Because everything is sorted
    by similarity, no order of classes or images matters. The networks have two hidden layers with ReLU; before each
    layer, the vector is normalised to mean 0 and variance 1, with a learned scale and shift.

    The published derivatives go on through the last turn of the others. Training then took four times as long, and on
    300 tasks of miniImageNet's validation classes it gave 72.7 ± 1.0 % instead of 72.5 ± 1.0 % (five shots). Published
    with a `width` of 4,096, and with features of any length; here they have unit length, so that the rate does not
    depend on their scale.
    """

    about = About(
        "Self-supervised re-ranking",
        "Shen et al. 2021",
        "Re-ranking for image retrieval and transductive few-shot classification",
        transductive=True,
        any_way=False,
    )
    steps: int = tunable(3, "turns of prototypes and queries", most=10_000, least=0)
    rate: float = tunable(1e-3, "learning rate of these steps", above=0)
    width: int = setting(192, "hidden units of each network", most=4096, least=1)
    initial_scale: float = setting(10.0, "start of the learned scale s of cosines", above=0)

    @property
    def any_queries(self) -> bool:
        return False

    def initial_on(self, model: HeadModel, generator: torch.Generator) -> Parameters:
        n, m = model.episode.n_way, model.episode.n_queries
        size = (n + m) * (n + m + 1) // 2 - m * (m - 1) // 2
        sizes = [(size, self.width), (self.width, self.width), (self.width, size)]
        start = {"scale": torch.tensor(self.initial_scale)}
        for update in UPDATES:
            for layer in LAYERS:
                name = f"{update}.{layer}"
                start |= Linear(name, *sizes[layer]).initial(generator)
                start |= {f"{name}.norm.weight": torch.tensor(1.0), f"{name}.norm.bias": torch.tensor(0.0)}
        return model.backbone.initial(generator) | start

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        n, features = task.n_way, self.normalised(parameters, features)
        if not features.requires_grad:
            features = span_coordinates(features)  # only lengths and angles matter
        vectors = [class_means(features[:, task.support], task.support_labels, n), features[:, task.queries]]
        for turn in range(len(UPDATES) * self.steps):
            own = turn % 2
            both = moves(parameters, UPDATES[own], torch.cat(vectors, 1), n)
            vectors[own] = vectors[own] - self.rate * (both[:, :n], both[:, n:])[own]
        prototypes, queries = (F.normalize(part, dim=2) for part in vectors)
        return parameters["scale"] * queries @ prototypes.mT


def moves(parameters: Parameters, update: str, vectors: Tensor, n_way: int) -> Tensor:
    """The gradient of all vectors, the prototypes first: (task, vector, feature) -> the same shape."""
    lengths = length_of(vectors)
    directions = vectors / lengths
    cosines = directions @ directions.mT  # (task, vector, vector)
    pairs = pairs_of(cosines, n_way)  # (task, vector, input)
    values = cosines.flatten(1).gather(1, pairs.flatten(1)).reshape(pairs.shape)
    n = values.shape[2]
    wanted = parameters[f"{update}.0.weight"].shape[1]
    if n != wanted:
        raise TaskSizeError(
            f"these weights compare {wanted} pairs of images, but tasks with {n_way} classes and "
            f"{vectors.shape[1] - n_way} queries have {n}: classify as many queries at once as in training"
        )
    for layer in LAYERS:
        values = scaled_and_shifted(parameters, f"{update}.{layer}", F.layer_norm(values, values.shape[2:]))
        values = linear(parameters, f"{update}.{layer}", values)
        values = F.relu(values) if layer != LAYERS[-1] else values
    of_cosines = torch.zeros_like(cosines).flatten(1).scatter_add(1, pairs.flatten(1), values.flatten(1))
    of_cosines = of_cosines.reshape(cosines.shape)
    pull = (of_cosines + of_cosines.mT) @ directions
    return turning(pull, directions, lengths)


def pairs_of(cosines: Tensor, n_way: int) -> Tensor:
    """Which cosines are the network's input: places in the flattened matrix, (task, vector, input)."""
    n = cosines.shape[1]
    itself = torch.arange(n, device=cosines.device).expand(len(cosines), -1)[..., None]
    falling = cosines.detach()
    near_prototypes = falling[..., :n_way].argsort(dim=2, descending=True, stable=True)
    near_queries = falling[..., n_way:].argsort(dim=2, descending=True, stable=True) + n_way
    order = torch.cat([itself, near_prototypes, near_queries], 2)  # (task, vector, 1 + vector)
    rows, columns = torch.triu_indices(1 + n_way, 1 + n, 1, device=cosines.device)
    return order[..., rows] * n + order[..., columns]
