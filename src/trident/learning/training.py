"""Training: the outer loop, with validation, logs and checkpoints in a run's folder.

A run's folder holds `last.safetensors` (everything needed to resume), `best.safetensors` (the weights that did best on
the validation classes), `log.jsonl` and, if TensorBoard is installed, its event files.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from trident.data.store import ImageStore
from trident.distributed.processes import ALONE, Processes, shared
from trident.engines.execution import Execution, execution_for
from trident.engines.learner import Gradient, only_finite
from trident.errors import NotFiniteError
from trident.learning.checkpoint import LAST, Checkpoint
from trident.learning.run_lock import held_by_first
from trident.learning.run_log import RunLog, Validated
from trident.learning.run_state import RunState, rate_at
from trident.learning.step_gradient import StepGradient
from trident.nn.parameters import Parameters
from trident.progress import Progress, StoppedError
from trident.recipes.recipe import Recipe
from trident.settings import TrainingSettings

# Measures weights (parameters and running statistics) on validation classes; implemented in `measuring/evaluate.py`.
Validate = Callable[[Recipe, Parameters, Parameters, ImageStore, Execution, Progress, Processes], Validated]


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

    With several processes, all call it with the same checkpoint. Each computes its share of every step's tasks.
    """
    recipe, settings = start.recipe, start.recipe.training
    execution = processes.on_each(lambda: _execution(start, device, engine, precision))
    kind = torch.device(device).type
    processes.check_same({"the device": kind, "the engine": execution.engine, "the precision": execution.precision})
    gradient = StepGradient(recipe, store, device, execution, processes)
    here: dict[str, Any] = {"device": device, "engine": execution.engine, "precision": execution.precision}
    here |= {} if processes.alone else {"processes": processes.size}
    state = RunState(replace(start, provenance=start.provenance | here), out, device, processes)
    with (
        held_by_first(out, processes),
        closing(RunLog(out, state.step, state.validated_step)) if processes.first else nullcontext() as log,
        watch_for_interrupts(announce=processes.alone) as interrupted,
        state.saved_if_a_process_is_lost(),
    ):

        def check_interrupt(done: int, total: int) -> None:
            if interrupted():
                raise StoppedError

        stop = False
        while not stop and not (processes.alone and interrupted()):
            at_its_turn = state.step % settings.validate_every == 0 or state.step == settings.steps
            if at_its_turn and state.step > state.validated_step:
                # Save first: a run that is stopped during validation resumes with this validation.
                state.save()
                weights = {key: value.detach() for key, value in state.parameters.items()}
                try:
                    evaluation = validate(recipe, weights, state.running, store, execution, check_interrupt, processes)
                except StoppedError:
                    break
                is_best = state.record_validation(evaluation)
                if log:
                    log.validation(state.step, evaluation)
                observer.on_validation(state.step, evaluation, is_best)
            if state.step >= settings.steps:
                break
            stop = _train_step(state, gradient, settings, log, observer, interrupted)
        state.save()
    return state.checkpoint()


def _train_step(
    state: RunState,
    gradient: StepGradient,
    settings: TrainingSettings,
    log: RunLog | None,
    observer: Observer,
    interrupted: Callable[[], bool],
) -> bool:
    """One meta-update. Returns whether one of several processes was interrupted, so that all stop."""
    began = time.perf_counter()
    result, asked_to_stop = gradient.of(state.step, state.parameters, interrupted)
    gradient.prefetch(state.step + 1)  # while the GPU is busy
    values = _summary(result)
    stop = asked_to_stop()
    norm, left_out = values["gradient_norm"], int(values["left_out"])
    if left_out > _most_left_out(settings.most_left_out, gradient.n_tasks) or not math.isfinite(norm):
        state.save()
        raise shared(NotFiniteError(_not_finite_message(result, state)))
    rate = rate_at(settings, state.step)
    state.update(result, norm, left_out, rate)
    values |= {"rate": rate, "seconds": time.perf_counter() - began}
    if log:  # the first process has it
        log.step(state.step, values, state.step % settings.log_every == 0 or state.step == settings.steps)
    observer.on_step(state.step, values)
    if state.step % settings.save_every == 0:
        state.save()
    return stop


def _execution(start: Checkpoint, device: str, engine: str, precision: str) -> Execution:
    """The requested engine and precision; auto: those the run started with, if on the same kind of device."""
    before = start.provenance
    same = torch.device(str(before["device"])).type == torch.device(device).type
    if (engine, precision) == ("auto", "auto") and same:
        engine, precision = before.get("engine", "plain"), before.get("precision", "fp32")
    return execution_for(device, engine, precision, start.recipe.in_training())


def _summary(result: Gradient) -> dict[str, Any]:
    """The logged values of a step, over its finite tasks. One transfer for all, because each waits for the GPU."""
    norm = torch.stack(torch._foreach_norm(list(result.gradient.values()))).norm()
    kept = result.finite.sum()
    parts = (*result.losses.values(), 100 * result.accuracy)
    means = [only_finite(part, result.finite).sum() / kept for part in parts]
    *losses, accuracy, norm_value, left_out = torch.stack([*means, norm, len(result.finite) - kept]).tolist()
    return {
        "accuracy": accuracy,
        "losses": dict(zip(result.losses, losses, strict=True)),
        "gradient_norm": norm_value,
        "left_out": left_out,
    }


def _most_left_out(share: float, n_tasks: int) -> int:
    """How many tasks of a step may be left out: at least one, unless the setting is 0 or there is only one task."""
    return min(max(1, int(share * n_tasks)), n_tasks - 1) if share else 0


def _not_finite_message(result: Gradient, state: RunState) -> str:
    """Says what is not finite, a part of the loss if possible, and what can be done."""
    bad = [name for name, part in result.losses.items() if not part.isfinite().all()]
    loss = f"{next((name for name in bad if name != 'total'), 'total')} loss" if bad else "meta-gradient"
    hint = "try a new run with a lower training.rate"
    if state.start.provenance["precision"] == "fp16":
        resume = "it may help to resume this run with --precision bf16"
        hint = f"fp16 holds numbers up to 65,504 only, so {resume}; otherwise {hint}"
    return (
        f"step {state.step + 1}: the {loss} is not finite. The state after step {state.step} is kept in "
        f"{state.out / LAST}; {hint}; with inner steps, also with a lower method.inner_rate; for TRIDENT, also with "
        "method.log_var_bound=8"
    )


@contextmanager
def watch_for_interrupts(announce: bool = True) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C or SIGTERM has arrived. A second Ctrl-C stops at once.

    A second SIGTERM does not: `timeout` sends two, one to the process and one to its group. Call the function from the
    main thread: it sets the handlers again each time, because LLVM replaces them when Triton first compiles. With
    `announce`, the first signal prints a line.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1 and announce:
            with suppress(OSError):  # standard error may be closed; the run is still saved
                os.write(2, b"\nstopping after this step; a second Ctrl-C stops at once and loses unsaved steps\n")

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
