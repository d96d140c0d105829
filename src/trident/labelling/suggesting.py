"""Which pictures of a pile to label next: those that are uncertain and stand for many other uncertain ones.

Pictures are chosen one after the other. Each pile picture i has an uncertainty m_i (1 - probability of its class +
probability of the runner-up) and a similarity to the nearest picture that is labelled or chosen already. The next
choice j is the one that raises the uncertainty-weighted sum of these similarities most:

    sum_i m_i max(0, cos(f_i, f_j) - nearest_i)
"""

import numpy as np

from trident.labelling.labelled import Labelled

CANDIDATES = 2000  # the most uncertain pictures, of which the suggestions are chosen
_REPRESENTED = 5000  # pictures of a larger pile that the choices should stand for, drawn at random


def suggest(labelled: np.ndarray, pile: np.ndarray, predicted: Labelled, n: int) -> list[int]:
    """Indices of at most `n` pictures of the pile, the best first. Those that belong to no class come last.

    `labelled` (picture, feature) and `pile` (picture, feature) have unit length; `predicted` labels the pile.
    """
    ordered = np.sort(predicted.probabilities, 1)
    uncertainty = (1 - ordered[:, -1] + ordered[:, -2]).astype(np.float32)
    if predicted.typicality is not None:
        uncertainty[predicted.typicality < predicted.least_typical] = 0
    candidates = np.sort(np.argsort(-uncertainty, kind="stable")[:CANDIDATES])
    represented = np.arange(len(pile))
    if len(pile) > _REPRESENTED:
        represented = np.sort(np.random.default_rng(0).choice(len(pile), _REPRESENTED, replace=False))
    similar = pile[candidates] @ pile[represented].T  # (candidate, represented)
    nearest = (pile[represented] @ labelled.T).max(1)
    weights = uncertainty[represented]
    chosen: list[int] = []
    for _ in range(min(n, len(candidates))):
        gains = np.maximum(similar - nearest, 0) @ weights
        gains[chosen] = -1
        best = int(gains.argmax())
        chosen.append(best)
        nearest = np.maximum(nearest, similar[best])
    return [int(candidates[place]) for place in chosen]
