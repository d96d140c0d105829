"""Training: the outer loop, with validation, logs and checkpoints in a run's folder.

A run's folder holds `last.safetensors` (everything needed to resume), `best.safetensors` (the weights that did best on
the validation classes), `log.jsonl` and, if TensorBoard is installed, its event files.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.engines.execution import Execution, execution_for
from trident.engines.learner import Gradient, only_finite
from trident.errors import LostProcessError, NotFiniteError
from trident.learning.checkpoint import BEST, LAST, Checkpoint, save_checkpoint
from trident.learning.interrupts import watch_for_interrupts
from trident.learning.learners import make_learner
from trident.learning.meta_update import make_optimizer, optimizer_state, rate_at, update
from trident.learning.run_lock import held_by_first
from trident.learning.run_log import NoLog, RunLog, Validated
from trident.learning.spreading import summed_over
from trident.nn.parameters import Parameters
from trident.progress import Progress, StoppedError
from trident.recipes.recipe import Recipe
from trident.settings import TrainingSettings
from trident.spread.processes import ALONE, Processes, shared
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import ClassSource, Source, TaskSource
from trident.tasks.task import Batch

RUNNING_MOMENTUM = 0.01  # weight of a new step in the running statistics


class Validate(Protocol):
    """Measures weights on validation classes; implemented in `measuring/validation.py`."""

    def __call__(
        self,
        recipe: Recipe,
        parameters: Parameters,
        running: Parameters,
        store: ImageStore,
        execution: Execution,
        progress: Progress,
        processes: Processes,
    ) -> Validated: ...


class Observer(Protocol):
    """Watches a training run, for example a progress bar."""

    def on_step(self, step: int, values: dict[str, Any]) -> None: ...

    def on_validation(self, step: int, validated: Validated, best: bool) -> None: ...


def train(
    start: Checkpoint,
    store: ImageStore,
    out: Path,
    device: str,
    observer: Observer,
    validate: Validate,
    engine: str = "auto",
    precision: str = "auto",
    processes: Processes = ALONE,
) -> Checkpoint:
    """Train from a checkpoint to the recipe's last step, or until interrupted; the last state is saved in `out`.

    With several processes, all call it with the same checkpoint. Each computes its share of every step's tasks, all
    make the same update, and the first one writes the files.
    """
    recipe, settings = start.recipe, start.recipe.training
    execution = processes.together(lambda: _execution(start, device, engine, precision))
    kind = torch.device(device).type
    processes.check_same({"the device": kind, "the engine": execution.engine, "the precision": execution.precision})
    provenance = start.provenance | {"device": device, "engine": execution.engine, "precision": execution.precision}
    if not processes.alone:
        provenance["processes"] = processes.size
    learner = make_learner(recipe.in_training(), execution)
    n_tasks = tasks_per_step(recipe)
    places = processes.block(range(n_tasks))
    # A process without a task computes the first one, for the shapes of the results. It is not counted.
    batches = _Batches(training_source(recipe, store, device), n_tasks, places or range(1), settings)
    parameters = {key: value.to(device).requires_grad_() for key, value in start.parameters.items()}
    running = {key: value.to(device) for key, value in start.running.items()}
    optimizer = make_optimizer(parameters, start)
    best, step, validated = start.best, start.step, start.validated_step

    def current() -> Checkpoint:
        return replace(
            start,
            parameters=parameters,
            running=running,
            provenance=provenance,
            step=step,
            optimizer=optimizer_state(parameters, optimizer),
            best=best,
            validated_step=validated,
        )

    def save() -> None:
        # Processes on different kinds of hardware round differently, and would slowly drift apart.
        state = current()
        processes.copy_from_first([*parameters.values(), *state.optimizer.values(), *running.values()])
        if processes.first:
            save_checkpoint(out / LAST, state)

    def go_on(done: int, total: int) -> None:
        if interrupted():
            raise StoppedError

    def computed() -> tuple[Gradient, Tensor | None]:
        own = _summed([learner.gradient(parameters, batch) for batch in batches.of(step)])
        return (own, None) if processes.alone else summed_over(processes, own, places, n_tasks, interrupted())

    @contextmanager
    def kept_if_a_process_is_lost() -> Iterator[None]:
        try:
            yield
        except LostProcessError as error:
            if processes.first:
                save_checkpoint(out / LAST, current())
            kept = f"the state after step {step} is kept in {out / LAST}"
            raise shared(LostProcessError(f"{error}; {kept}")) from error

    def best_is_lost() -> bool:
        return processes.from_first(lambda: best is not None and not (out / BEST).is_file())

    if best_is_lost():  # the next validation writes it anew, at once if this step has one
        best, validated = None, min(validated, step - 1)
    make_log = RunLog if processes.first else NoLog
    with (
        held_by_first(out, processes),
        make_log(out, step, validated) as log,
        watch_for_interrupts(says_so=processes.alone) as interrupted,
        kept_if_a_process_is_lost(),
    ):
        stop = False
        while not stop and not (processes.alone and interrupted()):
            if step > validated and (step % settings.validate_every == 0 or step == settings.steps):
                # Save first: a run that is stopped during validation resumes with this validation.
                save()
                weights = {key: value.detach() for key, value in parameters.items()}
                try:
                    evaluation = validate(recipe, weights, running, store, execution, go_on, processes)
                except StoppedError:
                    break
                validated = step
                is_best = best is None or best_is_lost() or evaluation.accuracy > best["accuracy"]
                if is_best:
                    best = {"step": step, **evaluation.to_json()}
                    if processes.first:
                        save_checkpoint(out / BEST, replace(current(), optimizer={}))
                log.validation(step, evaluation)
                observer.on_validation(step, evaluation, is_best)
            if step >= settings.steps:
                break
            began = time.perf_counter()
            result, stops = computed()
            batches.draw(step + 1)  # while the GPU is busy
            values = _summary(result)
            stop = stops is not None and bool(stops)
            norm, omitted = values["gradient_norm"], int(values["left_out"])
            if omitted > _most_omitted(settings, n_tasks) or not math.isfinite(norm):
                save()
                message = (
                    f"step {step + 1}: the {_culprit(result)} is not finite. The state after step {step} is kept in "
                    f"{out / LAST}; try a new run with a lower training.rate or inner rate, or a log_var_bound"
                )
                raise shared(NotFiniteError(message))
            rate = rate_at(settings, step)
            update(parameters, optimizer, result.gradient, norm, n_tasks - omitted, rate, settings)
            running = _moved(running, result, step, bool(omitted))
            step += 1
            values |= {"rate": rate, "seconds": time.perf_counter() - began}
            log.step(step, values, last_of_window=step % settings.log_every == 0 or step == settings.steps)
            observer.on_step(step, values)
            if step % settings.save_every == 0:
                save()
        save()
    return current()


def tasks_per_step(recipe: Recipe) -> int:
    """A batch of single images counts as one task."""
    return recipe.training.tasks_per_step if recipe.method.about.trained_on == "episodes" else 1


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


def _execution(start: Checkpoint, device: str, engine: str, precision: str) -> Execution:
    """The requested engine and precision; auto: those the run started with, if on the same kind of device."""
    before = start.provenance
    same = torch.device(str(before["device"])).type == torch.device(device).type
    if (engine, precision) == ("auto", "auto") and same:
        engine, precision = before.get("engine", "plain"), before.get("precision", "fp32")
    return execution_for(device, engine, precision, start.recipe.in_training())


class _Batches:
    """Each step's tasks for this process, in chunks. Those of the next step can be drawn ahead.

    `places` are those of this process among the `n_tasks` of a step.
    """

    def __init__(self, source: Source, n_tasks: int, places: range, settings: TrainingSettings):
        self.source = source
        self.n_tasks = n_tasks
        self.places = places
        self.settings = settings
        self.drawn: dict[int, list[Callable[[], Batch]]] = {}

    def of(self, step: int) -> list[Batch]:
        self.draw(step)
        return [ready() for ready in self.drawn.pop(step)]

    def draw(self, step: int) -> None:
        if step not in self.drawn and step < self.settings.steps:
            first, n_own = step * self.n_tasks + self.places.start, len(self.places)
            indices = range(first, first + n_own)
            at_once = self.settings.tasks_per_chunk or n_own
            chunks = [indices[start : start + at_once] for start in range(0, n_own, at_once)]
            self.drawn[step] = [self.source.ahead(chunk) for chunk in chunks]


def _summed(chunks: list[Gradient]) -> Gradient:
    """The gradient of one step's tasks, from those of its chunks."""
    if len(chunks) == 1:
        return chunks[0]

    def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    return Gradient(
        {key: torch.stack([chunk.gradient[key] for chunk in chunks]).sum(0) for key in chunks[0].gradient},
        joined([chunk.losses for chunk in chunks]),
        torch.cat([chunk.accuracy for chunk in chunks]),
        joined([chunk.statistics for chunk in chunks]),
        torch.cat([chunk.finite for chunk in chunks]),
    )


def _moved(running: Parameters, result: Gradient, step: int, omitted: bool) -> Parameters:
    """Running statistics after a step: a plain average at first, so that the initial values do not count."""
    if not result.statistics:
        return running
    seen = {key: value[result.finite] if omitted else value for key, value in result.statistics.items()}
    moved = torch._foreach_lerp(
        [running[key] for key in seen],
        [value.mean(0) for value in seen.values()],
        max(RUNNING_MOMENTUM, 1 / (step + 1)),
    )
    return running | dict(zip(seen, moved, strict=True))


def _summary(result: Gradient) -> dict[str, Any]:
    """The logged values of a step, over its finite tasks. One transfer from the GPU, because each one waits."""
    norm = torch.stack(torch._foreach_norm(list(result.gradient.values()))).norm()
    kept = result.finite.sum()
    parts = (*result.losses.values(), 100 * result.accuracy)
    means = [only_finite(part, result.finite).sum() / kept for part in parts]
    *losses, accuracy, norm_value, omitted = torch.stack([*means, norm, len(result.finite) - kept]).tolist()
    return {
        "accuracy": accuracy,
        "losses": dict(zip(result.losses, losses, strict=True)),
        "gradient_norm": norm_value,
        "left_out": omitted,
    }


def _most_omitted(settings: TrainingSettings, n_tasks: int) -> int:
    """How many tasks of a step: at least one, unless the setting is 0 or there is only one task."""
    if settings.most_left_out == 0:
        return 0
    return min(max(1, int(settings.most_left_out * n_tasks)), n_tasks - 1)


def _culprit(result: Gradient) -> str:
    """What is not finite: a part of the loss if possible, else the total or the meta-gradient."""
    bad = [name for name, part in result.losses.items() if not part.isfinite().all()]
    return f"{next((name for name in bad if name != 'total'), 'total')} loss" if bad else "meta-gradient"
