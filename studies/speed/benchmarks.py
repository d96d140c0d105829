"""Benchmarks of a meta-iteration and of an evaluation, each compared with the plain loop.

Tasks are sampled before the clock starts, unless each round is to draw its own, and the weights are untrained. Time and
memory include the patches that the library computes from the images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from studies.speed.plain_loop import PlainLoop, torch_settings
from studies.speed.timing import Measurement, Result, measure, timed
from trident.backbones.conv4 import conv4_of
from trident.data.store import ImageStore
from trident.engines.execution import Execution, device_name, make_learner
from trident.engines.workers import parallel_map
from trident.errors import NotFiniteError
from trident.learning.run_start import check_run
from trident.learning.step_gradient import training_source
from trident.measuring.prediction import chunks_of, predict
from trident.measuring.subject import TrainedModel, default_chunk
from trident.nn.parameters import Parameters, on_device
from trident.progress import StageProgress
from trident.recipes.recipe import Recipe
from trident.tasks.source import Source
from trident.tasks.task import Batch

LONGEST_ROUND = 60.0  # seconds; if the plain loop needs longer to evaluate, it is timed on fewer tasks
LAYOUTS = {"nchw": torch.contiguous_format, "channels-last": torch.channels_last}


@dataclass(frozen=True)
class Yardstick:
    """The results of the plain loop."""

    measurement: Measurement[Any]
    tasks: int  # number of timed tasks
    layout: str
    difference: float  # between its results and ours, as defined by the benchmark


@dataclass(frozen=True)
class Benchmark:
    name: str
    recipe: Recipe
    execution: Execution
    data: str
    tasks: int
    ours: Measurement[Any]
    plain: Yardstick | None

    @property
    def plain_seconds(self) -> float | None:
        """For all tasks, extrapolated if fewer were timed."""
        return self.plain.measurement.seconds * self.tasks / self.plain.tasks if self.plain else None

    @property
    def ratio(self) -> float | None:
        return self.plain_seconds / self.ours.seconds if self.plain_seconds else None

    def to_json(self) -> dict[str, Any]:
        ours, plain = self.ours, self.plain
        on_gpu = ours.memory.reserved is not None
        return {
            "benchmark": self.name,
            "recipe": self.recipe.name,
            "n_way": self.recipe.episode.n_way,
            "n_shot": self.recipe.episode.n_shot,
            "n_queries": self.recipe.episode.n_queries,
            "image_size": conv4_of(self.recipe.backbone, "this benchmark").image_size,
            "data": self.data,
            "tasks": self.tasks,
            "steps": self.recipe.method.inner_steps,
            "method": self.recipe.method.describe(),
            "device": device_name(self.execution.device),
            "engine": self.execution.engine,
            "precision": self.execution.precision,
            "torch": str(torch.__version__),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "repeats": len(ours.rounds),
            "seconds": ours.seconds,
            "seconds_of_each_round": ours.rounds,
            "tasks_per_second": self.tasks / ours.seconds,
            "warm_up_seconds": ours.warm_up,
            "peak_memory_gib": ours.memory.peak,
            "reserved_memory_gib": ours.memory.reserved,
            "peak_memory_of": "tensors on the GPU, tasks included" if on_gpu else "the whole process since its start",
            "plain_seconds": self.plain_seconds,
            "plain_seconds_of_each_round": plain.measurement.rounds if plain else None,
            "plain_tasks": plain.tasks if plain else None,
            "plain_peak_memory_gib": plain.measurement.memory.peak if plain else None,
            "plain_layout": plain.layout if plain else None,
            "ratio": self.ratio,
            "difference": plain.difference if plain else None,
        }


class Amount(TypedDict):
    """How much to measure, and whether to compare with the plain loop."""

    tasks: int
    repeats: int
    yardstick: bool
    plain_layout: NotRequired[str]  # of LAYOUTS
    new_tasks: NotRequired[bool]  # whether each round draws its own tasks, while the round before is computed
    progress: StageProgress


def bench_train(recipe: Recipe, execution: Execution, store: ImageStore, **amount: Unpack[Amount]) -> Benchmark:
    """Time the meta-gradient of some tasks. The difference is the relative error of the meta-gradient."""
    check_run(recipe, store)
    plain_images = replace(recipe, training=replace(recipe.training, augmentation="none"))
    source = training_source(plain_images, store, execution.device)
    recipe = recipe.in_training()
    at_once = recipe.training.tasks_per_chunk or amount["tasks"]
    parameters = _initial(recipe, execution.device)

    def ours() -> _OnTasks[Parameters]:
        learner = make_learner(recipe, execution)
        return lambda chunks: _sum([learner.gradient(parameters, _without_cache(chunk)).gradient for chunk in chunks])

    def plain(loop: PlainLoop) -> _OnTasks[Parameters]:
        return lambda chunks: _sum([loop.meta_gradient(parameters, chunk)[0] for chunk in chunks])

    work = _Work("train", ours, plain, relative_error, samples=False)
    return _benchmark(work, recipe, execution, source, at_once, **amount)


def bench_evaluate(recipe: Recipe, execution: Execution, store: ImageStore, **amount: Unpack[Amount]) -> Benchmark:
    """Time adaptation and prediction on some tasks. The difference is the largest difference of a probability."""
    recipe.check_all_at_once()
    device = execution.device
    running = recipe.model.initial_running()
    seed, at_once = recipe.training.seed, recipe.training.tasks_per_chunk or default_chunk(recipe, device)
    parameters = _initial(recipe, device)
    model = TrainedModel(recipe, parameters, running)
    source = model.source(store, "test", seed, device)

    def ours() -> _OnTasks[Tensor]:
        learner = model.learner(execution)

        def predicted(chunk: Batch) -> Tensor:
            return predict(learner, parameters, _without_cache(chunk).task, recipe.views)

        return lambda chunks: torch.cat(list(parallel_map(predicted, chunks, device)))

    def plain(loop: PlainLoop) -> _OnTasks[Tensor]:
        return lambda chunks: torch.cat([loop.predict(parameters, chunk) for chunk in chunks])

    work = _Work("evaluate", ours, plain, _largest_difference, samples=True)
    return _benchmark(work, recipe, execution, source, at_once, **amount)


_OnTasks = Callable[[list[Batch]], Result]


@dataclass(frozen=True)
class _Work(Generic[Result]):
    """What is timed: work on chunks of tasks, by the library and by the plain loop."""

    name: str
    ours: Callable[[], _OnTasks[Result]]
    plain: Callable[[PlainLoop], _OnTasks[Result]]
    difference: Callable[[Result, Result], float]
    samples: bool  # whether the plain loop may be timed on fewer tasks


def _benchmark(
    work: _Work[Result],
    recipe: Recipe,
    execution: Execution,
    source: Source,
    at_once: int,
    *,
    tasks: int,
    repeats: int,
    yardstick: bool,
    plain_layout: str = "nchw",
    new_tasks: bool = False,
    progress: StageProgress,
) -> Benchmark:
    if yardstick:
        PlainLoop(recipe)  # raises early if it does not support the recipe
    device, chunks = execution.device, _drawn(source, tasks, at_once)

    def ours() -> Callable[[], Result]:
        do = work.ours()
        return _on_new_tasks(do, source, tasks, at_once) if new_tasks else lambda: do(chunks)

    measured = measure(ours, device, repeats, lambda done, total: progress("trident", done, total))
    plain = None
    if yardstick:
        progress("plain loop", 0, repeats)
        do = work.plain(PlainLoop(recipe, LAYOUTS[plain_layout]))
        sample = _sample_for_plain_loop(do, source, chunks, at_once) if work.samples else chunks
        plain = _yardstick(do, plain_layout, sample, work.difference, measured, device, progress)
    return Benchmark(work.name, recipe, execution, source.dataset, tasks, measured, plain)


def _yardstick(
    do: _OnTasks[Result],
    layout: str,
    chunks: list[Batch],
    difference: Callable[[Result, Result], float],
    ours: Measurement[Result],
    device: str,
    progress: StageProgress,
) -> Yardstick:
    with torch_settings(exact=False):
        plain = measure(
            lambda: lambda: do(chunks),
            device,
            len(ours.rounds),
            lambda done, total: progress("plain loop", done, total),
        )
    expected = plain.result
    if torch.device(device).type == "cuda":  # timed with TF32, compared without
        with torch_settings(exact=True):
            expected = do(chunks)
    found = difference(ours.result, expected)
    if not math.isfinite(found):
        raise NotFiniteError("the results are not finite: with untrained weights these settings cannot be compared")
    return Yardstick(plain, sum(chunk.task.n_tasks for chunk in chunks), layout, found)


def _sample_for_plain_loop(do: _OnTasks[Result], source: Source, chunks: list[Batch], at_once: int) -> list[Batch]:
    """All tasks, or as many of the first as the plain loop can do in LONGEST_ROUND."""
    one, tasks = _drawn(source, 1, 1), sum(chunk.task.n_tasks for chunk in chunks)
    with torch_settings(exact=False):
        do(one)
        seconds, _ = timed(lambda: do(one), str(source.device))
    fit = max(1, int(LONGEST_ROUND / seconds))
    return chunks if fit >= tasks else _drawn(source, fit, at_once)


def relative_error(actual: Parameters, expected: Parameters) -> float:
    """The norm of the difference of two gradients, divided by the norm of the second."""
    difference = sum(float((actual[key] - expected[key]).square().sum()) for key in expected)
    return math.sqrt(difference / sum(float(value.square().sum()) for value in expected.values()))


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of a probability, given log-probabilities, on the first len(expected) tasks."""
    return float((actual[: len(expected)].exp() - expected.exp()).abs().max())


def _drawn(source: Source, tasks: int, at_once: int) -> list[Batch]:
    return [source.batch(indices) for indices in chunks_of(tasks, at_once)]


def _on_new_tasks(do: _OnTasks[Result], source: Source, tasks: int, at_once: int) -> Callable[[], Result]:
    """Work on other tasks at each call. As in training, those of the next call are drawn while the GPU is busy."""

    def drawn(first: int) -> list[Callable[[], Batch]]:
        return [source.prefetch([first + i for i in indices]) for indices in chunks_of(tasks, at_once)]

    upcoming, first = drawn(0), 0

    def work() -> Result:
        nonlocal upcoming, first
        result = do([ready() for ready in upcoming])
        first += tasks
        upcoming = drawn(first)
        return result

    return work


def _without_cache(batch: Batch) -> Batch:
    """Drop cached results, such as patches."""
    return batch._replace(task=batch.task.with_images(batch.task.images))


def _initial(recipe: Recipe, device: str) -> Parameters:
    return on_device(recipe.initial(recipe.training.seed), device)


def _sum(gradients: list[Parameters]) -> Parameters:
    first, *others = gradients
    return {key: sum((other[key] for other in others), value) for key, value in first.items()}
