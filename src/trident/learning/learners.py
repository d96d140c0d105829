"""From a recipe to the code that computes it."""

from typing import cast

from trident.engines.execution import Execution
from trident.engines.learner import Learner
from trident.importing import imported
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe


def make_learner(recipe: Recipe, execution: Execution, running: Parameters | None = None) -> Learner:
    """The recipe's learner, with its protocol's batch norm, on the engine and in the precision of `execution`."""
    kind = imported(recipe.method.learners[execution.engine])  # imported only if needed: fused learners import Triton
    return cast(Learner, kind(recipe.model, recipe.protocol.batch_norm, running, execution.precision))
