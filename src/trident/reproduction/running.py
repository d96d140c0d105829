"""Trains and measures what the panels still lack."""

import base64
import io
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from trident.ablations.files import Measurement, Paper
from trident.ablations.grid import Cell, Grid
from trident.ablations.results import RESULT, Result, read_results
from trident.ablations.running import GridRun
from trident.bench.timing import device_name
from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.measuring.calibration import Calibration, calibration, fit_temperature
from trident.measuring.decoupling import decoupling, projected_panels
from trident.measuring.evaluate import Evaluation, evaluate, mean_and_interval
from trident.measuring.reconstruction import reconstructions
from trident.progress import Progress
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.report.figures import picture
from trident.report.paper_results import paper_training
from trident.reproduction.panels import Model, Panel, Reproduction
from trident.reproduction.results import (
    ORDERS,
    BothOrders,
    Calibrated,
    Kept,
    Latents,
    Measured,
    Reconstructed,
    extended,
    keep,
    part_of,
    read,
)
from trident.settings import require

RECONSTRUCTED_TASKS = 50
FITTING_TASKS = 200  # of the validation classes, for the temperature
Bar = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Workshop:
    """Where the data are, where runs and results go, and how to show progress."""

    stores: dict[str, tuple[str, ImageStore]]  # by dataset: how to find it again, and the store
    runs: Path  # folder of trainings
    results: Path
    device: str
    budget: float
    say: Callable[[str], None]
    bar: Bar

    def store(self, dataset: str) -> ImageStore:
        require(dataset in self.stores, f"this needs the store of {dataset}: give it with --data STORE")
        return self.stores[dataset][1]


def missing(reproduction: Reproduction, panel: Panel, results: Path, budget: float = 1.0) -> list[tuple[Model, str]]:
    """The models of a panel, with the datasets on which they were not measured yet."""
    found = []
    for model in reproduction.models_of(panel):
        kept = read(model.name, results)
        for dataset in reproduction.datasets_of(panel, model):
            if kept is None or not _complete(kept, panel, dataset, round(model.steps * budget)):
                found.append((model, dataset))
    return found


def _complete(kept: Kept, panel: Panel, dataset: str, steps: int) -> bool:
    """A training that ended with an error has no accuracy, and that is its result."""
    if kept.error is not None:
        return True
    return kept.steps >= steps and dataset in getattr(kept, part_of(panel.kind))


def state(reproduction: Reproduction, panel: Panel, results: Path) -> str:
    """run, partly, not; or nothing to run."""
    models = reproduction.models_of(panel)
    if not models:
        return "nothing to run"
    wanted = sum(len(reproduction.datasets_of(panel, model)) for model in models)
    open_ones = len(missing(reproduction, panel, results))
    return "run" if not open_ones else "not run" if open_ones == wanted else f"{wanted - open_ones} of {wanted} run"


def grid_of(models: list[Model], budget: float) -> Grid:
    """The trainings as cells of a grid, so that they are locked, resumed and spread like those."""
    cells = [Cell(model.name, model.trained_recipe(budget)) for model in models]
    return Grid("reproduction", "trainings of the paper", {}, cells, Measurement(tasks=100), Paper())


def measure_model(reproduction: Reproduction, panel: Panel, model: Model, dataset: str, shop: Workshop) -> None:
    """Measure one model on one dataset and keep the result."""
    kept, checkpoint = _model(model, shop)
    if kept.error is not None:
        keep(model.name, kept, shop.results)
        return
    assert checkpoint is not None
    store, tasks = shop.store(dataset), reproduction.tasks[dataset]
    found: BothOrders | Latents | Reconstructed
    with shop.bar(f"{model.name} on {dataset}") as progress:
        if panel.kind == "latents":
            found = _latents(checkpoint, store, tasks, shop.device, progress)
        elif panel.kind == "reconstructions":
            found = _reconstructed(checkpoint, store, min(RECONSTRUCTED_TASKS, tasks), shop.device, progress)
        else:
            fitting = shop.store(model.data[0])
            found = both_orders(checkpoint, store, fitting, tasks, shop.device, progress)
    keep(model.name, extended(kept, part_of(panel.kind), dataset, found), shop.results)


def both_orders(
    checkpoint: Checkpoint, store: ImageStore, fitting: ImageStore, tasks: int, device: str, progress: Progress | None
) -> BothOrders:
    """The model's own protocol with both orders of the same queries."""
    began, fitting_tasks = time.perf_counter(), min(FITTING_TASKS, tasks)
    total = len(ORDERS) * (tasks + fitting_tasks)
    done_before = 0

    def evaluated(where: ImageStore, order: str, split: str, n_tasks: int) -> Evaluation:
        nonlocal done_before
        protocol = replace(checkpoint.recipe.protocol, query_order=order)  # type: ignore[arg-type]
        before = done_before

        def report(done: int, _: int) -> None:
            if progress:
                progress(before + done, total)

        done_before += n_tasks
        return evaluate(checkpoint, where, protocol, report, split=split, tasks=n_tasks, seed=0, device=device)

    orders, accuracies = {}, {}
    for order in ORDERS:
        result = evaluated(store, order, "test", tasks)
        fitted = evaluated(fitting, order, "val", fitting_tasks)
        by_validation, by_test = fit_temperature(fitted.predictions), fit_temperature(result.predictions)
        found = {
            "none": calibration(result.predictions),
            "validation": calibration(result.predictions, by_validation),
            "paper": calibration(result.predictions, by_test),
        }
        orders[order] = Measured(
            result.accuracy,
            result.ci95,
            tasks,
            result.describe_protocol(),
            {key: _calibrated(value) for key, value in found.items()},
        )
        accuracies[order] = result.predictions.accuracies
    difference = mean_and_interval(accuracies["class_sorted"] - accuracies["shuffled"])
    return BothOrders(orders, *difference, time.perf_counter() - began, device_name(device), store.fingerprint)


def _calibrated(found: Calibration) -> Calibrated:
    return Calibrated(found.ece, found.mce, found.brier, found.temperature)


def _latents(checkpoint: Checkpoint, store: ImageStore, tasks: int, device: str, progress: Progress | None) -> Latents:
    began = time.perf_counter()
    found = decoupling(checkpoint, store, split="test", tasks=tasks, seed=0, device=device, progress=progress)
    points = [
        {"title": panel.title(), "places": [[round(float(x), 3) for x in row] for row in panel.points]}
        for panel in projected_panels(found, 0)
    ]
    labels = [int(label) for label in found.shown.labels[0]]
    return Latents(found.to_json(), points, labels, time.perf_counter() - began, device_name(device), store.fingerprint)


def _reconstructed(
    checkpoint: Checkpoint, store: ImageStore, tasks: int, device: str, progress: Progress | None
) -> Reconstructed:
    began, errors, pictures = time.perf_counter(), [], ""
    for task in range(tasks):
        found = reconstructions(checkpoint, store, split="test", seed=0, task=task, device=device)
        errors.append((found.squared_error, found.squared_error_of_mean))
        pictures = pictures or _as_jpeg(np.concatenate([np.concatenate(list(row), 1) for row in found.swapped], 0))
        if progress:
            progress(task + 1, tasks)
    ours, of_mean = np.array(errors).T  # (task,) each
    ratio, ci95 = mean_and_interval(ours / of_mean)
    recipe = checkpoint.recipe
    protocol = f"{store.dataset} test, {recipe.episode.describe()}, {recipe.describe_protocol()}, {tasks} tasks, seed 0"
    seconds = time.perf_counter() - began
    return Reconstructed(
        float(ours.mean()),
        float(of_mean.mean()),
        ci95,
        ratio,
        tasks,
        protocol,
        pictures,
        seconds,
        device_name(device),
        store.fingerprint,
    )


def _as_jpeg(pixels: np.ndarray) -> str:
    """Pixels (h, w, c) in 0 .. 1 as a JPEG in base64."""
    buffer = io.BytesIO()
    Image.fromarray(picture(pixels)).save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()


def _model(model: Model, shop: Workshop) -> tuple[Kept, Checkpoint | None]:
    """What is kept of a model, and its weights; None if its training ended with an error."""
    kept = read(model.name, shop.results)
    checkpoint: Checkpoint | None
    if model.weights:
        checkpoint = load_checkpoint(model.weights)
        fresh = Kept(
            source=f"weights {model.weights}",
            n_shot=checkpoint.recipe.episode.n_shot,
            trained_order=checkpoint.recipe.protocol.query_order,
            steps=checkpoint.step,
            best_step=checkpoint.step,
            paper_steps=_paper_steps(checkpoint.recipe),
            parameters=sum(value.numel() for value in checkpoint.parameters.values()),
        )
    else:
        folder, recipe, result = shop.runs / model.name, model.trained_recipe(shop.budget), _result(model, shop)
        checkpoint = None if result.error else load_checkpoint(folder)
        fresh = Kept(
            source=" ".join([f"recipe {model.recipe}", *model.settings]),
            n_shot=recipe.episode.n_shot,
            trained_order=recipe.protocol.query_order,
            steps=result.steps,
            best_step=result.best_step,
            paper_steps=load_recipe(model.recipe).training.steps,
            parameters=result.parameters,
            training_seconds=training_seconds(folder),
            training_device=device_name(result.device),
            error=result.error,
        )
    if kept is not None and (kept.source, kept.steps, kept.best_step) == (fresh.source, fresh.steps, fresh.best_step):
        parts = {part: getattr(kept, part) for part in ("measured", "latents", "reconstructions")}
        return replace(fresh, **parts), checkpoint
    return fresh, checkpoint


def _paper_steps(recipe: Recipe) -> int:
    """Of the paper's training with as many shots."""
    wanted = (recipe.dataset, recipe.episode.n_shot)
    run = next(run for run in paper_training() if (run.train_dataset, run.n_shot) == wanted)
    return load_recipe(run.recipe).training.steps


def _result(model: Model, shop: Workshop) -> Result:
    grid = grid_of([model], shop.budget)
    results = read_results(grid, shop.runs)
    require(model.name in results, f"{shop.runs / model.name / RESULT} is missing: this training is not finished")
    return results[model.name]


def training_seconds(run: Path) -> float | None:
    """From the log of a run: the mean seconds of a step times the steps, without validation."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    steps = [line["seconds"] for line in lines if line["kind"] == "train"]
    last = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    return sum(steps) / len(steps) * last if steps else None


def training_run(models: list[Model], shop: Workshop, training_bar: Callable[..., object]) -> GridRun:
    """The trainings of some models on one dataset."""
    (dataset,) = {model.data[0] for model in models}
    store = shop.store(dataset)
    return GridRun(
        grid_of(models, shop.budget),
        store,
        shop.stores[dataset][0],
        shop.runs,
        shop.device,
        shop.say,
        training_bar,  # type: ignore[arg-type]
        shop.bar,
    )
