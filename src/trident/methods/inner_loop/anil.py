"""ANIL, "almost no inner loop" (Raghu et al. 2020): MAML that adapts the last layer alone."""

from dataclasses import dataclass

from trident.methods.base import About
from trident.methods.inner_loop.adapted_conv4 import HEAD, AdaptedConv4


@dataclass(frozen=True)
class Anil(AdaptedConv4):
    """MAML whose inner steps adapt the linear layer alone.

    Learned: a Conv4, and the start of a linear layer on its features. At test the linear layer takes gradient steps on
    the cross-entropy of the support set; the features stay as they are, so all steps share them. Training minimises
    the queries' cross-entropy after the steps, with the exact gradient, over both.
    """

    about = About(
        "ANIL",
        "Raghu et al. 2020",
        "Rapid Learning or Feature Reuse? Towards Understanding the Effectiveness of MAML",
        any_way=False,
    )

    def adapts(self, parameter: str) -> bool:
        return parameter.startswith(f"{HEAD}.")
