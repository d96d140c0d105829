"""SimpleShot (Wang et al. 2019): nearest mean on normalised features of a trained classifier."""

from dataclasses import dataclass

from torch import Tensor

from trident.methods.base import About, ClassifierHead, NormalisedHead, Parameters, Task, tunable
from trident.nn.classes import class_means, squared_distances


@dataclass(frozen=True)
class SimpleShot(ClassifierHead, NormalisedHead):
    """Nearest class mean on features that were trained as an ordinary classifier of all training classes.

    Learned: the backbone, with a linear layer that is not used afterwards. At test nothing is adapted: features are
    normalised (`NormalisedHead`), and a query belongs to the class whose mean support feature is nearest.
    """

    about = About(
        "SimpleShot",
        "Wang et al. 2019",
        "SimpleShot: Revisiting Nearest-Neighbor Classification for Few-Shot Learning",
        trained_on="classes",
    )
    scale: float = tunable(
        10.0, "scale of squared distances in the logits: how confident the probabilities are", above=0
    )

    def describe(self) -> str:
        return f"{self.normalisation} features"

    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        features = self.normalised(parameters, features)
        support, queries = features[:, task.support], features[:, task.queries]
        prototypes = class_means(support, task.support_labels, task.n_way)  # (task, n_way, feature)
        return -self.scale * squared_distances(queries, prototypes)
