"""BOIL, "body only update in inner loop" (Oh et al. 2021): MAML that adapts all but the last layer."""

from dataclasses import dataclass

from trident.backbones.conv4 import NAME
from trident.methods.base import About, setting, tunable
from trident.methods.inner_loop.adapted_conv4 import AdaptedConv4


@dataclass(frozen=True)
class Boil(AdaptedConv4):
    """MAML whose inner steps adapt the Conv4 alone.

    Learned: the start of a Conv4, and a linear layer on its features. At test the Conv4 takes one large gradient step
    on the cross-entropy of the support set, which moves the features towards the fixed rows of the linear layer.
    Training minimises the queries' cross-entropy after the step, with the exact gradient, over both.
    """

    about = About("BOIL", "Oh et al. 2021", "BOIL: Towards Representation Change for Few-shot Learning", any_way=False)
    inner_rate: float = tunable(0.5, "learning rate of the inner steps")
    inner_steps: int = tunable(1, "inner steps at test", most=100)
    training_inner_steps: int | None = setting(
        None, "inner steps in training; 'none' takes as many as at test", most=100
    )

    def adapts(self, parameter: str) -> bool:
        return parameter.startswith(NAME)
