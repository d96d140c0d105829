"""Trained weights as those of another method."""

from dataclasses import replace

from trident.learning.checkpoint import Checkpoint, Temperatures
from trident.methods.registry import method_name
from trident.recipes.loading import method_from


def with_method(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The weights as those of another method that is trained in the same way: parameters of the same names."""
    if method_name(checkpoint.recipe.method) == name:
        return checkpoint
    classes = checkpoint.recipe.method.n_training_classes
    recipe = replace(checkpoint.recipe, method=method_from(name, {"training_classes": classes} if classes else {}))
    return replace(
        checkpoint,
        recipe=recipe,
        parameters={key: checkpoint.parameters[key] for key in recipe.shapes()},
        running={key: checkpoint.running[key] for key in recipe.running_shapes()},
        temperatures=Temperatures(),  # they were fitted for the first method
    )
