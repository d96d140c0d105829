"""The gradient of one step of training: its tasks are drawn, computed in chunks, and summed over all processes."""

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.distributed.processes import Processes
from trident.engines.execution import Execution, make_learner
from trident.engines.learner import Gradient
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import ClassSource, Source, TaskSource
from trident.tasks.task import Batch


class StepGradient:
    """Computes the gradient of each step. Each process computes its share of the step's tasks."""

    def __init__(self, recipe: Recipe, store: ImageStore, device: str, execution: Execution, processes: Processes):
        self.learner = make_learner(recipe.in_training(), execution)
        self.source = training_source(recipe, store, device)
        self.settings = recipe.training
        self.processes = processes
        # A batch of single images counts as one task.
        self.n_tasks = recipe.training.tasks_per_step if recipe.method.about.trained_on == "episodes" else 1
        self.places = processes.block(range(self.n_tasks))
        self._drawn: dict[int, list[Callable[[], Batch]]] = {}

    def of(
        self, step: int, parameters: Parameters, interrupted: Callable[[], bool]
    ) -> tuple[Gradient, Callable[[], bool]]:
        """The gradient, and whether any process was interrupted; asking that waits until the GPU is done."""
        own = _sum_of_chunks([self.learner.gradient(parameters, batch) for batch in self.batches(step)])
        if self.processes.alone:
            return own, lambda: False
        whole, stops = _sum_over_processes(self.processes, own, self.places, self.n_tasks, interrupted())
        return whole, lambda: bool(stops)

    def batches(self, step: int) -> list[Batch]:
        """This process's tasks of a step, in chunks."""
        self.prefetch(step)
        return [ready() for ready in self._drawn.pop(step)]

    def prefetch(self, step: int) -> None:
        """Draw the tasks of a step, perhaps a later one, while the GPU is busy."""
        if step in self._drawn or step >= self.settings.steps:
            return
        # A process without a task computes the first one, for the shapes of the results. It is not counted.
        own = self.places or range(1)
        indices = range(step * self.n_tasks + own.start, step * self.n_tasks + own.stop)
        at_once = self.settings.tasks_per_chunk or len(own)
        chunks = [indices[start : start + at_once] for start in range(0, len(own), at_once)]
        self._drawn[step] = [self.source.prefetch(chunk) for chunk in chunks]


def training_source(recipe: Recipe, store: ImageStore, device: torch.device | str) -> Source:
    """What the recipe's method is trained on: tasks, or batches of images of all training classes."""
    settings = recipe.training
    if recipe.method.about.trained_on == "classes":
        noise = recipe.method.batch_noise()
        return ClassSource(store, settings.images_per_step, settings.seed, device, settings.augmentation, noise)
    training = recipe.in_training()
    return TaskSource(
        EpisodeSampler(store, "train", training.episode, training.protocol),
        training.model.noise_shapes(training.episode, 1),
        settings.seed,
        "train",
        sampled=settings.noise,
        device=device,
        augmentation=settings.augmentation,
        with_training_classes=recipe.method.n_training_classes > 0,
    )


def _sum_of_chunks(chunks: list[Gradient]) -> Gradient:
    """The gradient of one step's tasks, from those of its chunks."""
    if len(chunks) == 1:
        return chunks[0]

    def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    return Gradient(
        {key: torch.stack([chunk.gradient[key] for chunk in chunks]).sum(0) for key in chunks[0].gradient},
        joined([chunk.losses for chunk in chunks]),
        torch.cat([chunk.accuracy for chunk in chunks]),
        joined([chunk.statistics for chunk in chunks]),
        torch.cat([chunk.finite for chunk in chunks]),
    )


def _sum_over_processes(
    processes: Processes, own: Gradient, places: range, n_tasks: int, stop: bool
) -> tuple[Gradient, Tensor]:
    """One step's result from those of all processes, and how many of them ask to stop.

    `own` is this process's result for the tasks at `places` among the step's `n_tasks`. With no places, it does not
    count. All is summed in one exchange: the gradient, and a table in which every process fills the rows of its tasks.
    """
    by_task = [*own.losses.values(), own.accuracy, own.finite, *own.statistics.values()]  # (task, ...) each
    gradient = list(own.gradient.values())
    kind = reduce(torch.promote_types, [part.dtype for part in (*gradient, *by_task)])
    rows = torch.cat([part.reshape(len(part), -1).to(kind) for part in by_task], 1)  # (own task, number)
    table = rows.new_zeros(n_tasks, rows.shape[1])
    table[places.start : places.stop] = rows[: len(places)]
    packed = torch.cat([*(part.reshape(-1).to(kind) for part in gradient), table.reshape(-1), table.new_zeros(1)])
    if not places:
        packed.zero_()
    packed[-1:].fill_(float(stop))  # packed[-1] = ... would wait until the GPU is done
    processes.sum(packed)
    *sums, entries, stops = torch.split(packed, [*(part.numel() for part in gradient), table.numel(), 1])
    table = entries.view_as(table)
    columns = torch.split(table, [part[0].numel() for part in by_task], 1)
    whole = iter(
        column.reshape(n_tasks, *part.shape[1:]).to(part.dtype) for column, part in zip(columns, by_task, strict=True)
    )

    def next_of(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: next(whole) for name in names}

    totals = zip(own.gradient.items(), sums, strict=True)
    gathered = Gradient(
        {key: total.view_as(part).to(part.dtype) for (key, part), total in totals},
        losses=next_of(own.losses),
        accuracy=next(whole),
        finite=next(whole),
        statistics=next_of(own.statistics),
    )
    return gathered, stops[0]
