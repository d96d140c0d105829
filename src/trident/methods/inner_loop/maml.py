"""MAML (Finn et al. 2017), ANIL (Raghu et al. 2020) and BOIL (Oh et al. 2021)."""

from dataclasses import dataclass

from trident.backbones.conv4 import NAME
from trident.methods.base import About, setting, tunable
from trident.methods.inner_loop.adapted_conv4 import HEAD, AdaptedConv4


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
