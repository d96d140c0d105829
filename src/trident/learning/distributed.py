"""Training and measuring on several processes: what they agree on, and how the tasks of a step become one result."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import reduce

import torch
from torch import Tensor

import trident
from trident.data.store import ImageStore
from trident.distributed.processes import Processes
from trident.engines.learner import Gradient
from trident.learning.checkpoint import Checkpoint
from trident.recipes.loading import flat_values, recipe_from, recipe_values
from trident.recipes.recipe import Recipe


def check_same_inputs(processes: Processes, recipe: Recipe, store: ImageStore) -> None:
    """Check that all processes run the same programs, on the same data, by the same recipe."""
    if processes.alone:
        return
    processes.check_same({"the version of trident": trident.__version__, "the version of torch": torch.__version__})
    processes.check_same({"the fingerprint of the data": f"{store.fingerprint[:12]} ({store.dataset})"})
    processes.check_same({"the recipe": recipe.name, **flat_values(recipe)})


def checkpoint_from_first(processes: Processes, make: Callable[[], Checkpoint]) -> Checkpoint:
    """A checkpoint that only the first process makes or reads. The others need not see its files."""
    if processes.alone:
        return make()

    def packed() -> dict[str, object]:
        made = make()
        # Plain values instead of the recipe: its backbone may hold what cannot be sent, such as an open model.
        values = {entry.name: getattr(made, entry.name) for entry in fields(made)}
        return values | {"recipe": recipe_values(made.recipe)}

    values = processes.from_first(packed)
    recipe = recipe_from(values["recipe"], "the first process")  # type: ignore[arg-type]
    return Checkpoint(**values | {"recipe": recipe})  # type: ignore[arg-type]


def sum_over_processes(
    processes: Processes, own: Gradient, places: range, n_tasks: int, stop: bool
) -> tuple[Gradient, Tensor]:
    """One step's result from those of all processes, and how many of them ask to stop.

    `own` is this process's result for the tasks at `places` among the step's `n_tasks`. With no places, it does not
    count. All is summed in one exchange: the gradient, and a table with a row for each task, in which every process
    fills its own rows and leaves zeros in the others. So the rows arrive unchanged, in the order of the tasks.
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

    gathered = Gradient(
        {
            key: total.view_as(part).to(part.dtype)
            for (key, part), total in zip(own.gradient.items(), sums, strict=True)
        },
        losses=next_of(own.losses),
        accuracy=next(whole),
        finite=next(whole),
        statistics=next_of(own.statistics),
    )
    return gathered, stops[0]
