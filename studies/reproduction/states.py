"""Which panels are run, judged by the kept results."""

from pathlib import Path

from studies.reproduction.panels import Model, Panel, Reproduction
from studies.reproduction.results import ModelResults, read
from trident.files import short_digest
from trident.weights import weights_file

NOTHING = "nothing to run"


def is_complete(
    kept: ModelResults, panel: Panel, model: Model, dataset: str, tasks: int, budget: float, fingerprint: str | None
) -> bool:
    """Whether a model was measured as the panel asks. The result of a training without weights is its error."""
    if kept.made_from != model.made_from or kept.asked_steps < model.asked_steps(budget):
        return False
    if model.weights and kept.digest != short_digest(weights_file(model.weights)):
        return False
    if kept.error is not None and not kept.digest:
        return True
    found = kept.part(panel.kind).get(dataset)
    if found is None or found.source.tasks != tasks:
        return False
    return fingerprint is None or found.source.fingerprint == fingerprint


def state(reproduction: Reproduction, panel: Panel, results: Path) -> str:
    """How much of a panel is run, in words."""
    models = reproduction.models_of(panel)
    if panel.kind == "ablation":  # rows that the paper does not have are an extra
        models = [row.model for row in reproduction.ablation(panel) if row.paper]
    wanted = [(model, dataset) for model in models for dataset in panel.datasets_of(model)]
    if not wanted:
        return NOTHING
    whole = shorter = 0
    for model, dataset in wanted:
        kept, tasks = read(model.name, results), reproduction.tasks[dataset]
        if kept is None:
            continue
        if is_complete(kept, panel, model, dataset, tasks, 1.0, None):
            whole += 1
        elif is_complete(kept, panel, model, dataset, tasks, 0.0, None):
            shorter += 1
    if whole == len(wanted):
        return "done"
    parts = [f"{whole} of {len(wanted)} done"] if whole else []
    parts += [f"{shorter} of {len(wanted)} with fewer steps"] if shorter else []
    return ", ".join(parts) or "not run"
