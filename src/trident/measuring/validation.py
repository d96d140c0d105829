"""Validation during training, which chooses the best weights."""

from trident.data.store import ImageStore
from trident.distributed.processes import ALONE, Processes
from trident.engines.execution import Execution
from trident.engines.fused import why_not_fused
from trident.measuring.evaluate import Evaluation, evaluate_subject
from trident.measuring.subject import TrainedModel
from trident.nn.parameters import Parameters
from trident.progress import Progress
from trident.recipes.recipe import Recipe


def validate(
    recipe: Recipe,
    parameters: Parameters,
    running: Parameters,
    store: ImageStore,
    execution: Execution,
    progress: Progress,
    processes: Processes = ALONE,
) -> Evaluation:
    """Accuracy on validation tasks that no later measurement uses, on the engine of training if possible."""
    same = execution.engine == "plain" or why_not_fused(execution.device, recipe, execution.precision) is None
    return evaluate_subject(
        TrainedModel(recipe, parameters, running),
        store,
        progress,
        "selection",
        split="val",
        tasks=recipe.training.validation_tasks,
        seed=recipe.training.seed,
        device=execution.device,
        engine=execution.engine if same else "plain",
        precision=execution.precision if same else "auto",
        tasks_per_chunk=recipe.training.tasks_per_chunk,
        processes=processes,
    )
