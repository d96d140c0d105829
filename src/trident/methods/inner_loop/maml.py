"""MAML (Finn et al. 2017): a start that a few gradient steps turn into a good classifier."""

from dataclasses import dataclass

from trident.methods.base import About
from trident.methods.inner_loop.adapted_conv4 import AdaptedConv4


@dataclass(frozen=True)
class Maml(AdaptedConv4):
    """A start from which a few gradient steps on the support set lead to a good classifier.

    Learned: the start w of a Conv4 and of a linear layer on its features. At test all of them take gradient steps on
    the cross-entropy of the support set, then the queries are classified:

        w_0 = w,   w_(t+1) = w_t - a grad CE(support; w_t)

    Training minimises the queries' cross-entropy after the steps, CE(queries; w_n), over the start w. Its gradient is
    exact; with inner_order=first the second derivatives are left out (first-order MAML). As published, training takes
    5 steps and a test 10. The published network has 32 channels, and its batch norm always uses the current images.
    """

    about = About(
        "MAML", "Finn et al. 2017", "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", any_way=False
    )
