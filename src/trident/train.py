"""Meta-training: the outer loop, with validation, logs and checkpoints in a run's folder.

A run's folder holds `last.safetensors` (everything needed to go on), `best.safetensors` (the weights that did best on
the validation classes), `log.jsonl` and, if TensorBoard is installed, its event files.
"""

import math
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

import trident
from trident.adapt import MetaGradient, TaskBatch
from trident.checkpoint import BEST, LAST, Checkpoint, save_checkpoint
from trident.data.store import ImageStore
from trident.episodes import EpisodeSampler
from trident.errors import NotFiniteError, TridentError
from trident.evaluate import Evaluation, check_episode, check_images, chunks_of, evaluate
from trident.execution import Execution, execution_for, make_learner, make_model
from trident.meta_update import make_optimizer, optimizer_state, rate_at, update
from trident.objective import LossParts
from trident.run_log import RunLog
from trident.settings import Recipe, TrainingSettings
from trident.tasks import TaskSource

RUNNING_MOMENTUM = 0.01  # weight of a new step in the running batch-norm statistics


class Observer(Protocol):
    """Whoever watches a training run, a progress bar for instance."""

    def on_step(self, step: int, values: dict[str, float]) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation, best: bool) -> None: ...


def check_run(recipe: Recipe, store: ImageStore) -> None:
    """Whether the recipe can be trained on these data."""
    if recipe.protocol.batch_norm == "running":
        raise TridentError(
            "protocol.batch_norm is 'running': these statistics are gathered in training and serve evaluation only; "
            "train with 'transductive' or 'support'"
        )
    if recipe.protocol.queries_at_once == "one":
        raise TridentError("protocol.queries_at_once is 'one': it serves evaluation only; train with 'all'")
    check_images(recipe, store)
    validation = _validation(recipe)
    try:
        check_episode(recipe, validation.episode)
    except TridentError as error:
        raise TridentError(f"training.validation_n_way is {validation.episode.n_way}, but {error}") from error
    EpisodeSampler(store, "train", recipe.episode, recipe.protocol)
    EpisodeSampler(store, "val", validation.episode, recipe.protocol)


def _validation(recipe: Recipe) -> Recipe:
    """The recipe as validation tasks see it."""
    n_way = recipe.training.validation_n_way or recipe.episode.n_way
    return replace(recipe, episode=replace(recipe.episode, n_way=n_way))


def start_run(
    recipe: Recipe,
    store: ImageStore,
    data: str,
    out: Path,
    device: str,
    engine: str = "auto",
    precision: str = "auto",
) -> Checkpoint:
    """Check everything, then make the run's folder with its first checkpoint. `data` is how to find the store again."""
    check_run(recipe, store)
    execution = execution_for(device, engine, precision, recipe)
    if (out / LAST).exists() or (out / BEST).exists():
        raise TridentError(f"{out} already holds a run: continue it with --resume {out}, or choose another folder")
    if out.exists() and not out.is_dir():
        raise TridentError(f"{out} is a file: --out needs a folder")
    provenance = {
        "trident": trident.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        "engine": execution.engine,
        "precision": execution.precision,
        "data": data,
        "dataset": store.dataset,
        "fingerprint": store.fingerprint,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    model = make_model(recipe)
    start = Checkpoint(
        recipe, model.initial(recipe.training.seed), model.initial_running(), step=0, provenance=provenance
    )
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_checkpoint(out / LAST, start)
    except OSError as error:
        raise TridentError(f"cannot make the folder {out}: {error.strerror}") from error
    except TridentError:
        if not existed:
            out.rmdir()
        raise
    return start


def resume_run(checkpoint: Checkpoint, store: ImageStore, out: Path) -> Checkpoint:
    """The checkpoint itself, once it is clear that the data are the ones it was trained on."""
    if checkpoint.provenance["fingerprint"] != store.fingerprint:
        raise TridentError(
            f"{out} was trained on other data: its {checkpoint.provenance['dataset']} has the fingerprint "
            f"{checkpoint.provenance['fingerprint'][:12]}, this one {store.fingerprint[:12]}"
        )
    return checkpoint


def check_resumable(before: Recipe, after: Recipe) -> None:
    """Refuse changes that would make the run something other than one long run."""
    free = {"steps", "tasks_per_chunk", "validate_every", "validation_tasks", "save_every", "log_every"}
    if before.training.schedule == "cosine":
        free.discard("steps")  # the rate at every step hangs on their number
    kept = {name: getattr(before.training, name) for name in free}
    if replace(after, training=replace(after.training, **kept)) != before:
        raise TridentError(f"a resumed run can only change {', '.join(f'training.{name}' for name in sorted(free))}")


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
    learner = make_learner(recipe, execution)
    sampler = EpisodeSampler(store, "train", recipe.episode, recipe.protocol)
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
            if interrupted:
                raise _InterruptedError

        return evaluate(
            _validation(recipe),
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
        while not interrupted:
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
            norm = float(torch.stack(torch._foreach_norm(list(result.gradient.values()))).norm())
            culprit = _not_finite(result, norm)
            if culprit is not None:
                save_checkpoint(out / LAST, current())
                raise NotFiniteError(
                    f"step {step + 1}: the {culprit} is not finite. The state after step {step} is kept in "
                    f"{out / LAST}; try a new run with a lower adaptation.rate or training.rate, or a log_var_bound"
                )
            rate = rate_at(settings, step)
            update(parameters, optimizer, result.gradient, norm, rate, settings)
            for key, value in result.statistics.items():
                # A plain average at first, so that nothing of the initial values remains in it.
                running[key] = torch.lerp(running[key], value.mean(0), max(RUNNING_MOMENTUM, 1 / (step + 1)))
            step += 1
            values = {name: float(part.mean()) for name, part in result.loss._asdict().items()}
            values |= {"accuracy": 100 * float(result.accuracy.mean()), "gradient_norm": norm, "rate": rate}
            values["seconds"] = time.perf_counter() - began
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
    )


def _not_finite(result: MetaGradient, norm: float) -> str | None:
    """What blew up, if anything did. The loss's parts come before their total: the part is the culprit."""
    bad = [name for name, part in result.loss._asdict().items() if not bool(torch.isfinite(part).all())]
    if bad:
        return f"{next((name for name in bad if name != 'total'), 'total')} loss"
    return None if math.isfinite(norm) else "meta-gradient"


class _InterruptedError(Exception):
    """Raised inside a validation to leave it."""


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or a request to terminate arrives; a second Ctrl-C stops at once."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        os.write(2, b"\nstopping after this step; once more stops at once and loses what is not saved\n")

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, note) for number in signals]
    except ValueError:  # not in the main thread, where signals do not arrive
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
