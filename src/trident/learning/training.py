"""Meta-training: the outer loop, with validation, logs and checkpoints in a run's folder.

A run's folder holds `last.safetensors` (everything needed to go on), `best.safetensors` (the weights that did best on
the validation classes), `log.jsonl` and, if TensorBoard is installed, its event files.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from trident.data.store import ImageStore
from trident.engines.execution import Execution, execution_for, make_learner
from trident.errors import NotFiniteError
from trident.learning.checkpoint import BEST, LAST, Checkpoint, save_checkpoint
from trident.learning.inner_loop import MetaGradient, TaskBatch, only_finite
from trident.learning.meta_update import make_optimizer, optimizer_state, rate_at, update
from trident.learning.run_log import RunLog
from trident.learning.run_start import in_training
from trident.measuring.evaluate import Evaluation, chunks_of, evaluate
from trident.methods.trident.objective import LossParts
from trident.settings import TrainingSettings
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource

RUNNING_MOMENTUM = 0.01  # weight of a new step in the running batch-norm statistics


class Observer(Protocol):
    """Whoever watches a training run, a progress bar for instance."""

    def on_step(self, step: int, values: dict[str, float]) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation, best: bool) -> None: ...


def train(
    start: Checkpoint,
    store: ImageStore,
    out: Path,
    device: str,
    observer: Observer,
    engine: str = "auto",
    precision: str = "auto",
) -> Checkpoint:
    """Train from a checkpoint to the recipe's last step, or until interrupted; the last state is saved in `out`."""
    recipe, settings = start.recipe, start.recipe.training
    execution = _execution(start, device, engine, precision)
    provenance = start.provenance | {"device": device, "engine": execution.engine, "precision": execution.precision}
    learner = make_learner(in_training(recipe), execution)
    sampler = EpisodeSampler(store, "train", in_training(recipe).episode, recipe.protocol)
    source = TaskSource(
        sampler,
        recipe.model,
        recipe.adaptation,
        settings.seed,
        "train",
        device=device,
        augmentation=settings.augmentation,
    )
    batches = _Batches(source, settings)
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

    def validate() -> Evaluation:
        def go_on(done: int, total: int) -> None:
            if interrupted():
                raise _InterruptedError

        return evaluate(
            recipe,
            {key: value.detach() for key, value in parameters.items()},
            running,
            store,
            split="val",
            tasks=settings.validation_tasks,
            seed=settings.seed,
            device=device,
            engine=execution.engine,
            precision=execution.precision,
            tasks_per_chunk=settings.tasks_per_chunk,
            progress=go_on,
            stream="selection",
        )

    with RunLog(out, start.step, start.validated_step) as log, _interrupts() as interrupted:
        while not interrupted():
            if step > validated and (step % settings.validate_every == 0 or step == settings.steps):
                # Saved first: a run that is stopped while it validates owes that validation, and resumes with it.
                save_checkpoint(out / LAST, current())
                try:
                    evaluation = validate()
                except _InterruptedError:
                    break
                validated = step
                is_best = best is None or evaluation.accuracy > best["accuracy"]
                if is_best:
                    best = {"step": step, **evaluation.to_json()}
                    save_checkpoint(out / BEST, replace(current(), optimizer={}))
                log.validation(step, evaluation)
                observer.on_validation(step, evaluation, is_best)
            if step >= settings.steps:
                break
            began = time.perf_counter()
            result = _summed([learner.meta_gradient(parameters, batch) for batch in batches.of(step)])
            batches.draw(step + 1)  # while the GPU, if there is one, is at work
            values = _summary(result)
            if values["left_out"] > _may_be_left_out(settings) or not math.isfinite(values["gradient_norm"]):
                save_checkpoint(out / LAST, current())
                raise NotFiniteError(
                    f"step {step + 1}: the {_culprit(result)} is not finite. The state after step {step} is kept in "
                    f"{out / LAST}; try a new run with a lower adaptation.rate or training.rate, or a log_var_bound"
                )
            rate = rate_at(settings, step)
            update(parameters, optimizer, result.gradient, values["gradient_norm"], rate, settings)
            keys = list(result.statistics)
            # A plain average at first, so that nothing of the initial values remains in it.
            moved = torch._foreach_lerp(
                [running[key] for key in keys],
                [
                    (result.statistics[key][result.finite] if values["left_out"] else result.statistics[key]).mean(0)
                    for key in keys
                ],
                max(RUNNING_MOMENTUM, 1 / (step + 1)),
            )
            running |= dict(zip(keys, moved, strict=True))
            step += 1
            values |= {"rate": rate, "seconds": time.perf_counter() - began}
            log.step(step, values, last_of_window=step % settings.log_every == 0 or step == settings.steps)
            observer.on_step(step, values)
            if step % settings.save_every == 0:
                save_checkpoint(out / LAST, current())
        save_checkpoint(out / LAST, current())
    return current()


def _execution(start: Checkpoint, device: str, engine: str, precision: str) -> Execution:
    """What was asked for; and where nothing was, what the run was begun with, if that was on such a device."""
    before = start.provenance
    same = torch.device(str(before["device"])).type == torch.device(device).type
    if (engine, precision) == ("auto", "auto") and same:
        engine, precision = before.get("engine", "plain"), before.get("precision", "fp32")
    return execution_for(device, engine, precision, start.recipe)


class _Batches:
    """The tasks of each step, in chunks where memory is short. Those of the next step can be drawn ahead."""

    def __init__(self, source: TaskSource, settings: TrainingSettings):
        self.source = source
        self.settings = settings
        self.drawn: dict[int, list[TaskBatch]] = {}

    def of(self, step: int) -> list[TaskBatch]:
        self.draw(step)
        return self.drawn.pop(step)

    def draw(self, step: int) -> None:
        if step not in self.drawn and step < self.settings.steps:
            tasks = self.settings.tasks_per_step
            first = step * tasks
            chunks = chunks_of(tasks, self.settings.tasks_per_chunk or tasks)
            self.drawn[step] = [self.source.batch(range(first + c.start, first + c.stop)) for c in chunks]


def _summed(chunks: list[MetaGradient]) -> MetaGradient:
    """The meta-gradient of one step's tasks, from its chunks'."""
    if len(chunks) == 1:
        return chunks[0]
    return MetaGradient(
        {key: torch.stack([chunk.gradient[key] for chunk in chunks]).sum(0) for key in chunks[0].gradient},
        LossParts(*(torch.cat(parts) for parts in zip(*(chunk.loss for chunk in chunks), strict=True))),
        torch.cat([chunk.accuracy for chunk in chunks]),
        {key: torch.cat([chunk.statistics[key] for chunk in chunks]) for key in chunks[0].statistics},
        torch.cat([chunk.finite for chunk in chunks]),
    )


def _summary(result: MetaGradient) -> dict[str, float]:
    """What is logged of a step, over its finite tasks: fetched from a GPU in one go, because each fetching waits."""
    norm = torch.stack(torch._foreach_norm(list(result.gradient.values()))).norm()
    kept = result.finite.sum()
    means = [only_finite(part, result.finite).sum() / kept for part in (*result.loss, 100 * result.accuracy)]
    names = [*LossParts._fields, "accuracy", "gradient_norm", "left_out"]
    return dict(zip(names, torch.stack([*means, norm, len(result.finite) - kept]).tolist(), strict=True))


def _may_be_left_out(settings: TrainingSettings) -> int:
    """Of a step's tasks: one at least, unless none may be or there is no other."""
    if settings.most_left_out == 0:
        return 0
    return min(max(1, int(settings.most_left_out * settings.tasks_per_step)), settings.tasks_per_step - 1)


def _culprit(result: MetaGradient) -> str:
    """What blew up. The loss's parts come before their total: the part is the culprit."""
    bad = [name for name, part in result.loss._asdict().items() if not part.isfinite().all()]
    return f"{next((name for name in bad if name != 'total'), 'total')} loss" if bad else "meta-gradient"


class _InterruptedError(Exception):
    """Raised inside a validation to leave it."""


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Gives a question to ask: has Ctrl-C or a request to terminate arrived? A second Ctrl-C stops at once.

    A second request to terminate does not: `timeout` sends two, one to the process and one to its group. Each question
    sets the handlers again, so it is for the main thread: LLVM, when Triton first compiles, puts its own in their
    place, which last for one signal, and the second would end the process.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1:
            with suppress(OSError):  # nobody may be listening any more, and the run is to be saved all the same
                os.write(2, b"\nstopping after this step; a further Ctrl-C stops at once and loses what is not saved\n")

    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupted() -> bool:
        for number in signals:
            signal.signal(number, note)
        return bool(received)

    try:
        before = [signal.signal(number, note) for number in signals]
    except ValueError:  # not in the main thread, where signals do not arrive
        yield lambda: False
        return
    try:
        yield interrupted
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
