"""How many labels of a pile will be right, judged by the labelled pictures that were left out."""

import torch

from trident.labelling.labelled import Expected
from trident.methods.evidence.method import Judgement

_FEWEST = 4  # left-out pictures for any judgement


def expected_accuracy(judgement: Judgement) -> Expected | None:
    """The mean probability of the labels, which left-out pictures have calibrated; None with too few of these.

    Its interval has three parts: how far the temperature of the probabilities is known; the number of pictures in the
    pile; and the number of labelled ones, whose features decide about all of the pile.
    """
    n_left_out, n_pile = len(judgement.left_out), len(judgement.log_probabilities)
    if n_left_out < _FEWEST:
        return None
    of_factors = torch.stack(
        [(factor * judgement.log_probabilities).softmax(1).amax(1).mean() for factor in judgement.sharper]
    )
    share = float(judgement.belief @ of_factors)
    of_temperature = float(judgement.belief @ (of_factors - share) ** 2)
    towards_half = (share * n_left_out + 2) / (n_left_out + 4)  # as Agresti and Coull: none wrong of few proves little
    variance = of_temperature + share * (1 - share) / n_pile + towards_half * (1 - towards_half) / (n_left_out + 4)
    half = 1.96 * variance**0.5
    return Expected(share, max(0.0, share - half), min(1.0, share + half), n_left_out)
