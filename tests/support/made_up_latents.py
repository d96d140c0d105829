"""Label latents with random weights, in place of trained ones."""

import torch

from trident.labelling.label_latents import LabelLatents
from trident.methods.trident.features import TRAINING_MEAN, TridentOnFeatures


def made_up_latents(n_features: int, trust_from: float = -2.0, seed: int = 0) -> LabelLatents:
    """By default, the network counts whatever the pictures look like."""
    method = TridentOnFeatures(
        semantic_latents=4, label_width=8, decoder_width=4, trust_from=trust_from, trust_to=trust_from + 0.5
    )
    generator = torch.Generator().manual_seed(seed)
    parameters = method.initial(n_features, generator)
    for key in ("label.loc.weight", "attfex.mask.weight"):
        parameters[key] = 0.3 * torch.randn(parameters[key].shape, generator=generator)
    mean = torch.ones(n_features) / n_features**0.5
    return LabelLatents(method.for_few_queries(), parameters | {TRAINING_MEAN: mean})
