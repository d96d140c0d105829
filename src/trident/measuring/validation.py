"""Validation during training, which chooses the best weights."""

from trident.data.store import ImageStore
from trident.distributed.processes import ALONE, Processes
from trident.engines.execution import Execution
from trident.engines.fused import why_not_fused
from trident.measuring.evaluate import Evaluation, evaluate
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
    own = recipe.training
    return evaluate(
        TrainedModel(recipe, parameters, running),
        store,
        progress=progress,
        processes=processes,
        stream="selection",
        split="val",
        tasks=own.validation_tasks,
        seed=own.seed,
        device=execution.device,
        engine=execution.engine if same else "plain",
        precision=execution.precision if same else "auto",
        tasks_per_chunk=own.tasks_per_chunk,
    )
