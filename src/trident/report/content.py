"""Measures everything that a report shows about a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint
from trident.learning.run_log import LOG, read_log
from trident.measuring.audit import Audit, audit, default_protocol
from trident.measuring.calibration import Calibration, CalibrationResult, calibrate, calibration, fit_temperature
from trident.measuring.decoupling import Decoupling, Panel, decoupling, projected_panels
from trident.measuring.evaluate import Sample
from trident.measuring.reconstruction import Reconstructions, reconstructions
from trident.nn.parameters import count_by_part
from trident.progress import StageProgress


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
    panels: tuple[Panel, ...]
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

    def on(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(stage, done, total) if progress else None

    told = on("accuracy and calibration")
    calibrated = calibrate(measured, store, "validation", fitting_store, audit_tasks, told, **sample)
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
        tuple(projected_panels(decoupled, seed)) if decoupled else (),
        decoded,
        store,
    )


def run_name(checkpoint: Checkpoint) -> str:
    path = checkpoint.path
    if path is None:
        return checkpoint.recipe.name
    return path.resolve().parent.name if (path.parent / LOG).is_file() else path.stem
