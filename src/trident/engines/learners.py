"""Which learner computes a method, by engine. They are imported when used: those of the fused engine need Triton.

A method has the learners of its nearest base class in the table, so most new methods need no entry.
"""

from trident.methods.base import HeadOnFeatures, Method
from trident.methods.inner_loop.base import InnerLoopMethod
from trident.methods.trident.network import Trident

INNER_LOOP = "trident.engines.plain.inner_loop:InnerLoopLearner"
LEARNERS: dict[type[Method], dict[str, str]] = {
    HeadOnFeatures: {  # type: ignore[type-abstract]
        "plain": "trident.engines.plain.heads:HeadLearner",
        "fused": "trident.engines.fused.heads:FusedHeadLearner",
    },
    InnerLoopMethod: {"plain": INNER_LOOP},  # type: ignore[type-abstract]
    Trident: {"plain": INNER_LOOP, "fused": "trident.engines.fused.trident:FusedTridentLearner"},
}


def learners_of(method: type[Method]) -> dict[str, str]:
    """The import paths of a method's learners, by engine."""
    found = next(LEARNERS[base] for base in method.__mro__ if base in LEARNERS)
    own_step = issubclass(method, HeadOnFeatures) and method.training_step is not HeadOnFeatures.training_step
    return {"plain": found["plain"]} if own_step else found  # the fused engine does not call `training_step`
