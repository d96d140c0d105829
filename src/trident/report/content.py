"""Measures everything that a report about a run shows, or a comparison of runs on the same tasks."""

from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint
from trident.learning.run_log import LOG, read_log
from trident.measuring.audit import Audit, audit, default_protocol
from trident.measuring.calibration import Calibration, CalibrationResult, calibrate, calibration, fit_temperature
from trident.measuring.decoupling import Decoupling, decoupling, projected_panels
from trident.measuring.evaluate import Evaluation, evaluate
from trident.measuring.latents import Reconstructions, reconstructions
from trident.measuring.subject import Sample
from trident.nn.parameters import count, count_by_part
from trident.progress import Progress, StageProgress, part_of
from trident.recipes.loading import recipe_values


@dataclass(frozen=True)
class Report:
    name: str
    checkpoint: Checkpoint
    log: tuple[dict[str, Any], ...]  # lines of the run's log; empty for a weights file alone
    parameters: dict[str, int]  # count for each part of the network
    calibration: CalibrationResult  # with the evaluation for the headline
    fitted_as_paper: Calibration
    audit: Audit
    decoupling: Decoupling | None  # None where there are no latents, or too few queries for a score
    panels: list[tuple[str, np.ndarray]]  # titles and points (query, 2) of latents in the plane
    reconstructions: Reconstructions | None  # None where there is no decoder
    store: ImageStore

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "weights": self.checkpoint.summary(),
            **self.calibration.to_json(),
            "temperature_as_paper": self.fitted_as_paper.to_json(),
            "audit": self.audit.to_json(),
            "decoupling": self.decoupling and self.decoupling.to_json(),
            "parameters": self.parameters,
        }


def make_report(
    checkpoint: Checkpoint,
    store: ImageStore,
    fitting_store: ImageStore,
    audit_tasks: int,
    progress: StageProgress | None = None,
    **sample: Unpack[Sample],
) -> Report:
    """Measure a run under the default protocol, whatever it was trained under; the audit shows the others."""
    measured = replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=default_protocol(checkpoint)))
    fewer: Sample = {**sample, "tasks": audit_tasks}
    split, tasks, seed = sample["split"], sample["tasks"], sample["seed"]

    def on(stage: str) -> Progress:
        return lambda done, total: progress(stage, done, total) if progress else None

    on_task = on("accuracy and calibration")
    calibrated = calibrate(measured, store, "validation", fitting_store, audit_tasks, on_task, **sample)
    predictions = calibrated.evaluation.predictions
    where = f"{store.dataset} {split}, {tasks} tasks, seed {seed}"
    as_paper = calibration(predictions, fit_temperature(predictions), "paper", where)
    audited = audit(measured, store, progress=lambda name, *done: on(f"audit: {name}")(*done), **fewer)
    decoupled, decoded, analyses = None, None, checkpoint.recipe.method.about.analyses
    if "latents" in analyses and checkpoint.recipe.episode.n_query > 1:
        decoupled = decoupling(measured, store, progress=on("latents"), **fewer)
    if "reconstructions" in analyses:
        decoded = reconstructions(measured, store, split=split, seed=seed, device=sample.get("device", "cpu"))
    if progress and decoupled:
        progress("projecting latents", 0, 1)
    return Report(
        run_name(checkpoint),
        checkpoint,
        read_log(checkpoint.path),
        count_by_part(checkpoint.parameters),
        calibrated,
        as_paper,
        audited,
        decoupled,
        projected_panels(decoupled, seed) if decoupled else [],
        decoded,
        store,
    )


def run_name(checkpoint: Checkpoint) -> str:
    path = checkpoint.path
    if path is None:
        return checkpoint.recipe.name
    return path.resolve().parent.name if (path.parent / LOG).is_file() else path.stem


@dataclass(frozen=True)
class ComparedRun:
    name: str
    checkpoint: Checkpoint
    evaluation: Evaluation
    calibration: Calibration
    parameters: int
    log: tuple[dict[str, Any], ...]
    difference: tuple[float, float] | None  # from the first run, in points, paired by task; None if the tasks differ


@dataclass(frozen=True)
class Comparison:
    runs: tuple[ComparedRun, ...]

    def differing_settings(self) -> dict[str, list[Any]]:
        """The settings that differ between the runs."""
        tables = [recipe_values(run.checkpoint.recipe) for run in self.runs]
        settings: dict[str, list[Any]] = {"recipe": [table["name"] for table in tables]}
        sections = [section for section, values in tables[0].items() if isinstance(values, dict)]
        for section in sections:
            for key in dict.fromkeys(key for table in tables for key in table[section]):
                settings[f"{section}.{key}"] = [table[section].get(key, "-") for table in tables]
        return {key: values for key, values in settings.items() if any(value != values[0] for value in values)}

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "name": run.name,
                    **run.evaluation.record(weights=run.checkpoint.summary(), parameters=run.parameters).to_json(),
                    "calibration": run.calibration.to_json(),
                    "difference": run.difference and dict(zip(("points", "ci95"), run.difference, strict=True)),
                }
                for run in self.runs
            ],
            "differing_settings": self.differing_settings(),
        }


def compare(
    checkpoints: list[Checkpoint],
    stores: list[ImageStore],
    progress: StageProgress | None = None,
    **sample: Unpack[Sample],
) -> Comparison:
    """Measure each run under the default protocol. Runs with the same data and episodes get the same tasks."""
    runs: list[ComparedRun] = []
    for place, (checkpoint, store, name) in enumerate(zip(checkpoints, stores, _names(checkpoints), strict=True)):
        report = part_of(progress, name, place, len(checkpoints))
        result = evaluate(checkpoint, store, default_protocol(checkpoint), report, **sample)
        first = runs[0].evaluation if runs else None
        difference = None
        if first and (first.fingerprint, first.subject.episode) == (result.fingerprint, result.subject.episode):
            difference = result.points_above(first)
        counted, log = count(checkpoint.parameters), read_log(checkpoint.path)
        scores = calibration(result.predictions)
        runs.append(ComparedRun(name, checkpoint, result, scores, counted, log, difference))
    return Comparison(tuple(runs))


def _names(checkpoints: list[Checkpoint]) -> list[str]:
    """The runs' names; runs with the same name also get their file's name."""
    names = [run_name(checkpoint) for checkpoint in checkpoints]
    return [
        f"{name}/{checkpoint.path.name}" if names.count(name) > 1 and checkpoint.path else name
        for name, checkpoint in zip(names, checkpoints, strict=True)
    ]
