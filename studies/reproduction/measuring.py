"""Measures one model on one dataset: with queries sorted by class, and with the same queries shuffled."""

import base64
import io
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from studies.reproduction.results import (
    ORDERS,
    BothOrders,
    Decoded,
    Latents,
    Reconstructed,
    Source,
)
from trident.data.store import ImageStore
from trident.engines.execution import Execution, device_name
from trident.errors import NotFiniteError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.calibration import calibration, fit_temperature
from trident.measuring.decoupling import Decoupling, davies_bouldin, decoupling
from trident.measuring.evaluate import Evaluation, evaluate
from trident.measuring.latents import reconstructions
from trident.measuring.record import mean_and_interval
from trident.progress import Progress
from trident.report.figures import picture

FITTING_TASKS = 200  # of the validation classes, for the temperature
RECONSTRUCTED_TASKS = 50


def with_query_order(checkpoint: Checkpoint, order: str) -> Checkpoint:
    """The model under its own protocol, with another order of the queries."""
    protocol = replace(checkpoint.recipe.protocol, query_order=order)  # type: ignore[arg-type]
    return replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=protocol))


def progress_after(progress: Progress | None, before: int, total: int) -> Callable[[int, int], None]:
    """Progress of one of several parts of the work."""

    def report(done: int, _: int) -> None:
        if progress:
            progress(before + done, total)

    return report


def both_orders(
    checkpoint: Checkpoint, store: ImageStore, fitting: ImageStore, tasks: int, device: str, progress: Progress | None
) -> BothOrders:
    """`fitting` has the validation classes on which a temperature is fitted."""
    began, fitting_tasks = time.perf_counter(), min(FITTING_TASKS, tasks)
    total = len(ORDERS) * (tasks + fitting_tasks)
    orders, problems, accuracies = {}, {}, {}
    execution: Execution | None = None
    for place, order in enumerate(ORDERS):
        model, before = with_query_order(checkpoint, order), place * (tasks + fitting_tasks)

        def evaluated(where: ImageStore, split: str, n_tasks: int, before: int) -> Evaluation:
            report = progress_after(progress, before, total)
            return evaluate(model, where, progress=report, split=split, tasks=n_tasks, seed=0, device=device)  # noqa: B023

        try:
            result = evaluated(store, "test", tasks, before)
            fitted = evaluated(fitting, "val", fitting_tasks, before + tasks)
        except NotFiniteError as error:  # for example inner steps that were learned with the other order
            problems[order] = str(error)
            continue
        execution, accuracies[order] = result.execution, result.predictions.accuracies
        temperatures = {"none": 1.0, "validation": fit_temperature(fitted.predictions)}
        temperatures["paper"] = fit_temperature(result.predictions)
        found = {on: calibration(result.predictions, value).figures() for on, value in temperatures.items()}
        orders[order] = result.record(calibration=found)
    difference, ci95 = None, None
    if not problems:
        difference, ci95 = mean_and_interval(accuracies["class_sorted"] - accuracies["shuffled"])
    source = _source(store, tasks, device, time.perf_counter() - began, execution)
    return BothOrders(orders, problems, difference, ci95, source)


def _source(store: ImageStore, tasks: int, device: str, seconds: float, execution: Execution | None) -> Source:
    """`execution` is None if nothing could be measured."""
    engine, precision = (execution.engine, execution.precision) if execution else ("", "")
    return Source(tasks, store.fingerprint, device_name(device), engine, precision, seconds)


def latents(checkpoint: Checkpoint, store: ImageStore, tasks: int, device: str, progress: Progress | None) -> Latents:
    began, total = time.perf_counter(), len(ORDERS) * tasks
    found = {
        order: decoupling(
            with_query_order(checkpoint, order),
            store,
            split="test",
            tasks=tasks,
            seed=0,
            device=device,
            engine="plain",
            precision="fp32",
            progress=progress_after(progress, place * tasks, total),
        )
        for place, order in enumerate(ORDERS)
    }
    source = _source(store, tasks, device, time.perf_counter() - began, Execution(device))
    return Latents(
        {order: one.to_json() for order, one in found.items()},
        {order: _points(one) for order, one in found.items()},
        {order: one.shown.labels[0].tolist() for order, one in found.items()},
        source,
    )


def _points(result: Decoupling) -> list[dict[str, Any]]:
    """The latents of one task in the plane of their two largest principal components."""
    from sklearn.decomposition import PCA

    labels = result.shown.labels[0]
    points: list[dict[str, Any]] = []
    for name, values in result.shown_points().items():
        plane = PCA(2, svd_solver="full").fit_transform(values)
        title = f"{name}\nDavies-Bouldin {davies_bouldin(values, labels):.2f}"
        points.append({"title": title, "places": [[round(float(x), 3) for x in row] for row in plane]})
    return points


def reconstructed(
    checkpoint: Checkpoint, store: ImageStore, tasks: int, device: str, progress: Progress | None
) -> Reconstructed:
    """On the first tasks only; `tasks` is how many the panel asks for."""
    began, used = time.perf_counter(), min(RECONSTRUCTED_TASKS, tasks)
    orders, swapped, protocol = {}, np.zeros(0), ""
    for place, order in enumerate(ORDERS):
        model, errors = with_query_order(checkpoint, order), []
        for task in range(used):
            found = reconstructions(model, store, split="test", seed=0, task=task, device=device)
            errors.append((found.squared_error, found.squared_error_of_mean))
            swapped, protocol = found.swapped if task == 0 else swapped, found.protocol
            progress_after(progress, place * used, len(ORDERS) * used)(task + 1, used)
        ours, of_mean = np.array(errors).T  # (task,) each
        orders[order] = Decoded(float(ours.mean()), float(of_mean.mean()), *mean_and_interval(ours / of_mean))
    source = _source(store, tasks, device, time.perf_counter() - began, Execution(device))
    return Reconstructed(orders, f"{protocol}, {used} tasks, seed 0", _as_jpeg(swapped), source)


def _as_jpeg(images: np.ndarray) -> str:
    """A grid of images (row, column, h, w, c) in 0 .. 1 as a JPEG in base64."""
    pixels = np.concatenate([np.concatenate(list(row), 1) for row in images], 0)
    buffer = io.BytesIO()
    Image.fromarray(picture(pixels)).save(buffer, "JPEG", quality=85)
    return base64.b64encode(buffer.getvalue()).decode()
