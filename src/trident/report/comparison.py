"""Compares runs on the same tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

from trident.data.store import ImageStore
from trident.learning.checkpoint import Checkpoint
from trident.learning.run_log import read_log
from trident.measuring.audit import default_protocol
from trident.measuring.calibration import Calibration, calibration
from trident.measuring.evaluate import Evaluation, Sample, evaluate
from trident.nn.parameters import count
from trident.recipes.loading import recipe_values
from trident.report.content import run_name


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
        found: dict[str, list[Any]] = {"recipe": [table["name"] for table in tables]}
        sections = [section for section, values in tables[0].items() if isinstance(values, dict)]
        for section in sections:
            for key in dict.fromkeys(key for table in tables for key in table[section]):
                found[f"{section}.{key}"] = [table[section].get(key, "-") for table in tables]
        return {key: values for key, values in found.items() if any(value != values[0] for value in values)}

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
    progress: Callable[[str, int, int], None] | None = None,
    **sample: Unpack[Sample],
) -> Comparison:
    """Measure each run under the default protocol. Runs with the same data and episodes get the same tasks."""
    runs: list[ComparedRun] = []
    names = _names(checkpoints)
    for place, (checkpoint, store) in enumerate(zip(checkpoints, stores, strict=True)):
        name = names[place]

        def report(done: int, total: int, name: str = name, place: int = place) -> None:
            if progress:
                progress(name, place * total + done, len(checkpoints) * total)

        result = evaluate(checkpoint, store, default_protocol(checkpoint), report, **sample)
        first = runs[0].evaluation if runs else None
        same = first is not None and (first.fingerprint, first.episode) == (result.fingerprint, result.episode)
        difference = result.points_above(first) if first is not None and same else None
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
