"""TRIDENT's label latents of features, by the trained weights that come with the package.

They take the place of the features when pictures are compared. `docs/results.md` tells what this is worth.
"""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from trident.backbones.frozen import FrozenBackbone
from trident.learning.checkpoint import load_checkpoint
from trident.methods.base import HeadModel
from trident.methods.trident_features import TridentOnFeatures
from trident.nn.parameters import Parameters
from trident.tasks.task import Task

WEIGHTS = "features-trident"


@dataclass(frozen=True)
class LabelLatents:
    """A trained `TridentOnFeatures`. What it makes of a picture depends on the labelled pictures, on no others."""

    method: TridentOnFeatures  # with mask_from="support"
    parameters: Parameters  # with the statistics of its training

    def take_the_place_of(self, features: Tensor, task: Task) -> None:
        """Overwrite features (1, picture, feature), the labelled pictures first: there may be many."""
        parameters = {key: value.to(features) for key, value in self.parameters.items()}
        self.method.label_means(parameters, features, task, out=features)


@cache
def latents_for(backbone: str) -> LabelLatents | None:
    """Those that were trained on features of this backbone; None if there are none."""
    checkpoint = load_checkpoint(WEIGHTS)
    trained, model = checkpoint.recipe.backbone, checkpoint.recipe.model
    assert isinstance(trained, FrozenBackbone)
    assert isinstance(model, HeadModel)
    if trained.of != backbone:
        return None
    method = checkpoint.recipe.method.for_few_queries()
    assert isinstance(method, TridentOnFeatures)
    return LabelLatents(method, model.of_head(checkpoint.parameters, checkpoint.running))
