"""Measures one row on one board."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from trident.data.store import ImageStore, class_table
from trident.data.store_writer import new_hash
from trident.engines.execution import device_name
from trident.files import short_digest
from trident.leaderboard.boards import CONDITIONS, FEWER_TASKS_ALONE, Board
from trident.leaderboard.results import Results
from trident.leaderboard.rows import Row
from trident.leaderboard.subjects import (
    Features,
    always_alone,
    checkpoint_of,
    n_parameters,
    under_condition,
    with_features,
)
from trident.learning.checkpoint import Checkpoint
from trident.measuring.calibration import calibration, fit_temperature
from trident.measuring.evaluate import Evaluation, evaluate
from trident.progress import Progress

FITTING_TASKS = 200
Stage = Callable[[str], Progress | None]  # from what is being done to a progress bar for it


def measure(
    row: Row,
    board: Board,
    store: ImageStore,
    fitting_store: ImageStore,
    features: Features,
    tasks: int,
    device: str,
    stage: Stage = lambda _: None,
) -> Results:
    """The results by condition. One temperature is fitted, on balanced validation tasks of `fitting_store`."""
    whole = checkpoint_of(row, board)
    images = tasks * board.episode.n_images * (1 + len(board.conditions))

    def evaluated(where: ImageStore, condition: str, split: str, n_tasks: int) -> Evaluation:
        checkpoint, seen = with_features(whole, where, row, features, images)
        checkpoint = under_condition(checkpoint, row, CONDITIONS[condition])
        progress = stage(f"{row.name}, {board.name}, {condition if split == 'test' else 'temperature'}")
        return evaluate(checkpoint, seen, progress=progress, split=split, tasks=n_tasks, seed=0, device=device)

    fitting = evaluated(fitting_store, "balanced", "val", min(FITTING_TASKS, tasks))
    temperature = fit_temperature(fitting.predictions)
    with_features(whole, store, row, features, images)  # so that computing features is not timed
    # Other programs change the time that passes, but hardly the time that a CPU computes.
    clock = time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    found = {}
    for condition in board.conditions:
        if condition == "alone" and not whole.recipe.method.any_queries:
            continue
        n_tasks = max(2, tasks // FEWER_TASKS_ALONE) if condition == "alone" else tasks
        # A method that classifies each query alone anyway gives the same answers to all at once, in less time.
        alone = condition == "alone" and always_alone(whole, row)
        began = clock()
        result = evaluated(store, "balanced" if alone else condition, "test", n_tasks)
        seconds = clock() - began
        found[condition] = result.record(
            described=result.describe_protocol() + (", each query alone" if alone else ""),
            protocol={},  # the board and the row say it
            data=fingerprint_of_test_classes(store),
            weights=identity(whole),
            parameters=n_parameters(whole),
            milliseconds=1000 * seconds / n_tasks,
            execution=asdict(result.execution) | {"device": device_name(device)},
            calibration={"validation": calibration(result.predictions, temperature).figures()},
        )
    return found


def identity(whole: Checkpoint) -> dict[str, Any]:
    """What was measured, so that results can be told from those of other weights or settings."""
    file = whole.path
    return whole.summary() | {
        "file": file.name if file else None,  # readers have other folders
        "digest": short_digest(file) if file else None,
        "method": asdict(whole.recipe.method),
    }


def fingerprint_of_test_classes(store: ImageStore) -> str:
    """What decides which tasks are drawn: the same for every store with these test classes, whatever else it holds."""
    own = ((entry.name, entry.split, entry.count) for entry in store.classes_of("test"))
    return str(new_hash(class_table(own)).hexdigest()[:12])
