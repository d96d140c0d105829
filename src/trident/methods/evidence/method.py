"""Evidence: the labelled images themselves tell which head to trust, and how far.

A fifth of the labelled images is left out, put among the queries, and labelled by every head from the others; and so on
until each had its turn. How well a head did decides the temperature of its probabilities and its weight in the average.
Then the queries are looked at together, and a last temperature is fitted in the same way, to labelled images that count
as often as their class occurs among the queries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trident.methods.base import About, HeadOnFeatures, Parameters, Task, tunable
from trident.methods.evidence.heads import LOG_TEMPERATURES, OF_ONE_LABEL, logits_of_heads
from trident.methods.transductive.soft_kmeans import expected_shares

_FOLDS = 5
_ENOUGH_LEFT_OUT = 500  # labelled images; if there are many more, not all folds are needed
_SAMPLE = 2000  # images of a larger pile that stand for it while labelled images are left out
_SHARPNESS = 0.25  # weights are likelihoods to this power: heads that are nearly as good count nearly as much
_STEPS = torch.linspace(-2, 2, 81, dtype=torch.float64)  # of a log-temperature, around what is known of it
_PRIOR = 4.0  # how strongly the known temperature counts: as a precision of its logarithm
_ROUNDS = 30  # in which class shares and probabilities are computed from each other
# With k labels of a class, heads that were fitted without one of them need a log-temperature higher by this / k^2.
_LEFT_WITH_FEWER = 1.1
_PRIOR_AT_LAST = 10.0  # the same for the last temperature
_TOO_SURE = 0.12  # log-temperature by which a pile that is looked at together is too sure

# Labelled features (image, feature), their labels (image,), the number of classes, queries (query, feature), and
# whether these are looked at together -> logits (query, class) float64 by the name of the head.
Heads = Callable[[Tensor, Tensor, int, Tensor, bool], dict[str, Tensor]]


class Judgement(NamedTuple):
    """The labels of a pile, and what the labelled images that were left out say about them."""

    log_probabilities: Tensor  # (image, class) float64
    shares: Tensor  # (class,): of the pile, as far as it can be told
    weights: dict[str, float]  # of the heads
    left_out: Tensor  # (n,) indices of the labelled images that were left out
    log_probabilities_left_out: Tensor  # (n, class)
    importance: Tensor  # (n,): how often images of this class occur in the pile, 1 on average
    sharper: Tensor  # (temperature,): factors of the log-probabilities that could be right, 1 for the chosen one
    belief: Tensor  # (temperature,): how probable each factor is


@dataclass(frozen=True)
class Evidence(HeadOnFeatures):
    """Kernel ridge regression, ridge regression, nearest mean and soft k-means, weighed by left-out labelled images.

    Nothing is trained. With one labelled image of each class nothing can be left out: then soft k-means counts alone.
    """

    about = About(
        "Evidence",
        "this package",
        "Heads weighed by labelled images that are left out",
        trained_on="nothing",
        transductive=True,
    )
    together: bool = tunable(True, "whether the queries are looked at together")

    @property
    def classifies_together(self) -> bool:
        return self.together

    def for_few_queries(self) -> "Evidence":
        return Evidence(together=False)

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        unit = F.normalize(features.detach(), dim=2).cpu()
        labels = task.support_labels.cpu()
        of_tasks = [
            judge([rows[task.support]], of_support, task.n_way, [rows[task.queries]], self.together).log_probabilities
            for rows, of_support in zip(unit, labels, strict=True)
        ]
        return torch.stack(of_tasks).to(features)


def judge(
    support: list[Tensor],
    labels: Tensor,
    n_way: int,
    pile: list[Tensor],
    together: bool = True,
    heads: Heads = logits_of_heads,
) -> Judgement:
    """Label a pile. `support` and `pile` are features of unit length (image, feature), of one kind or more."""

    def logits_from(chosen: Tensor, targets: list[Tensor]) -> dict[str, Tensor]:
        """By head and kind of features, from these labelled images."""
        return {
            name if kind == 0 else f"{name} {kind + 1}": logits
            for kind, (rows, others) in enumerate(zip(support, targets, strict=True))
            for name, logits in heads(rows[chosen], labels[chosen], n_way, others, together).items()
        }

    everything = torch.arange(len(labels))
    folds = _folds(support[0], labels, n_way)
    left_out = torch.cat([everything[:0], *folds])
    sample = torch.from_numpy(canonical_order(pile[0].numpy()))[:: -(-len(pile[0]) // _SAMPLE)]
    sample = sample if together else sample[:0]
    full = logits_from(everything, pile)
    runs = []  # in each, the images that are left out come first, then the sample of the pile
    for out in folds:
        targets = [torch.cat([rows[out], of_pile[sample]]) for rows, of_pile in zip(support, pile, strict=True)]
        runs.append(logits_from(_without(everything, out), targets))

    # Temperatures and weights of the heads.
    truth = labels[left_out]
    temperatures, evidence = {}, {}
    for name in full:
        logits = torch.cat([full[name][:0], *(run[name][: len(out)] for run, out in zip(runs, folds, strict=True))])
        known = LOG_TEMPERATURES.get(name.split(" ")[0], 0.0)
        steps = (known if folds else OF_ONE_LABEL.get(name, known)) + _STEPS
        likelihoods = _likelihoods(logits, truth, steps)
        best = int((likelihoods - _PRIOR / 2 * _STEPS**2).argmax())
        temperatures[name], evidence[name] = math.exp(float(steps[best])), float(likelihoods[best])
    weights = _weights(evidence, bool(folds))

    def average(logits: Mapping[str, Tensor], sharper: float = 1.0) -> Tensor:
        parts = [
            weights[name] * (sharper * logits[name] / temperatures[name]).log_softmax(1)
            for name in full
            if weights[name]
        ]
        return torch.stack(parts).sum(0).log_softmax(1)

    # The pile is looked at together: how frequent are its classes? With few labels of each, the heads prefer some
    # classes in the whole pile, which looks as if those were frequent. So the shares count for less.
    n_labels = torch.bincount(labels, minlength=n_way).double()
    trust = float((n_labels / (n_labels + 1)).mean()) if together and folds else 0.0
    of_left_out = (1 / n_labels[truth] ** 2).mean() if folds else torch.zeros(())
    alone = average(full, math.exp(_LEFT_WITH_FEWER * float(of_left_out)))
    labelled, shares = _with_shares(alone, alone, trust)
    parts = [alone[:0]]
    for run, out in zip(runs, folds, strict=True):
        both = average(run)
        parts.append(_with_shares(both[: len(out)], both[len(out) :], trust)[0])

    # The last temperature. Left-out images count as often as their class occurs in the pile.
    importance = (shares / torch.bincount(truth, minlength=n_way).clamp(min=1))[truth]
    importance = importance / importance.mean()
    steps = _STEPS + (_TOO_SURE if together else 0.0)
    belief = (_likelihoods(torch.cat(parts), truth, steps, importance) - _PRIOR_AT_LAST / 2 * _STEPS**2).softmax(0)
    chosen = math.exp(-float(steps[belief.argmax()]))
    return Judgement(
        (chosen * labelled).log_softmax(1),
        shares,
        weights,
        left_out,
        (chosen * torch.cat(parts)).log_softmax(1),
        importance,
        (-steps).exp() / chosen,
        belief,
    )


def _with_shares(log_probabilities: Tensor, pile: Tensor, trust: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (image, class) that count in the class shares of a pile, and these shares (class,).

    Shares and probabilities are computed from each other by turns, starting from equal shares. `trust` of 0 leaves
    probabilities and shares as they are, so that no image depends on the others.
    """
    shares = torch.full((pile.shape[1],), 1 / pile.shape[1], dtype=pile.dtype)
    for _ in range(_ROUNDS if trust and len(pile) else 0):
        counts = (pile + trust * shares.log()).softmax(1).sum(0)
        shares = expected_shares(counts[None])[0]
    return (log_probabilities + trust * shares.log()).log_softmax(1), shares


def _likelihoods(logits: Tensor, truth: Tensor, log_temperatures: Tensor, importance: Tensor | None = None) -> Tensor:
    """The log-likelihood of the true labels at each temperature."""
    if not len(truth):
        return torch.zeros(len(log_temperatures), dtype=torch.float64)
    scaled = logits / log_temperatures.exp()[:, None, None]  # (temperature, image, class)
    of_truth = scaled.log_softmax(2)[:, torch.arange(len(truth)), truth]
    return (of_truth if importance is None else of_truth * importance).sum(1)


def _weights(evidence: dict[str, float], judged: bool) -> dict[str, float]:
    """Without any left-out image the last rounds of soft k-means count, of the last kind of features."""
    if judged:
        values = torch.tensor(list(evidence.values()), dtype=torch.float64)
        return dict(zip(evidence, (_SHARPNESS * values).softmax(0).tolist(), strict=True))
    last = list(evidence)[-1]
    return {name: float(name == last) for name in evidence}


def _folds(support: Tensor, labels: Tensor, n_way: int) -> list[Tensor]:
    """Indices of the labelled images that are left out in turn. Each class keeps at least one image."""
    order = torch.from_numpy(canonical_order(support.numpy()))
    fold = torch.full((len(labels),), -1)
    begun = 0
    for label in range(n_way):
        own = order[labels[order] == label]
        if len(own) > 1:
            fold[own] = (begun + torch.arange(len(own))) % _FOLDS
            begun += len(own)
    n_folds = min(_FOLDS, math.ceil(_ENOUGH_LEFT_OUT * _FOLDS / max(1, begun)))
    folds = [torch.nonzero(fold == one)[:, 0] for one in range(n_folds)]
    return [one for one in folds if len(one)]


def _without(indices: Tensor, out: Tensor) -> Tensor:
    kept = torch.ones(len(indices), dtype=torch.bool)
    kept[out] = False
    return indices[kept]


def canonical_order(rows: np.ndarray) -> np.ndarray:
    """Indices that sort images by their features, so that nothing depends on the order in which they were given."""
    rows = np.ascontiguousarray(rows)
    return np.argsort(rows.view(np.dtype((np.void, rows.strides[0]))).ravel(), kind="stable")
