"""The kept results as tables: one section for each panel, for the document and for the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from studies.reproduction.correlation import ablation_rows, correlations
from studies.reproduction.panels import Model, Panel, Reproduction
from studies.reproduction.paper_results import find, paper_table
from studies.reproduction.recipe_tables import Table, parameters_table, training_table
from studies.reproduction.results import ORDER_NAMES, ORDERS, BothOrders, ModelResults, Source, read
from studies.reproduction.states import state
from trident.measuring.record import plus_minus

FITTED = {"none": "no temperature", "validation": "fitted on validation tasks", "paper": "fitted on the scored tasks"}
# How each dataset's store is given on the command line.
STORES = {"mini-imagenet": "--data mini.store", "cub": "--cub cub.store", "tiny-imagenet": "--data tiny.store"}


@dataclass(frozen=True)
class Section:
    panel: Panel
    state: str
    command: str  # that runs what is missing; empty if there is nothing to run
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


def sections(reproduction: Reproduction, folder: Path) -> list[Section]:
    return [section(reproduction, panel, folder) for panel in reproduction.panels]


def section(reproduction: Reproduction, panel: Panel, folder: Path) -> Section:
    makers = {
        "drawing": _drawing,
        "accuracy": _accuracy,
        "parameters": parameters_table,
        "calibration": _calibration,
        "ablation": _ablation,
        "latents": _latents,
        "reconstructions": _reconstructions,
        "training": training_table,
    }
    headings, rows, notes = makers[panel.kind](reproduction, panel, folder)
    if panel.note:
        notes = [panel.note, *notes]
    command = _command(reproduction, panel)
    return Section(panel, state(reproduction, panel, folder), command, headings, rows, notes)


def _command(reproduction: Reproduction, panel: Panel) -> str:
    models = reproduction.models_of(panel)
    needed = {name for model in models for name in (model.data[0], *panel.datasets_of(model))}
    options = [
        STORES.get(name, f"--data {name}")
        for name in sorted(needed, key=lambda name: (name not in STORES, name == "cub", name))
    ]
    return " ".join(["python -m studies.reproduction", panel.name, *options]) if models else ""


def _drawing(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    return [], [], []


def _results_of(reproduction: Reproduction, panel: Panel, folder: Path) -> Iterator[tuple[Model, ModelResults | None]]:
    for model in reproduction.models_of(panel):
        yield model, read(model.name, folder)


def _accuracy(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["trained on queries", "shots", "measured on", "steps (of the paper's)", "published, %"]
    headings += ["queries sorted by class, %", "the same queries shuffled, %", "difference, points"]
    headings += ["training, s", "measuring, s"]
    rows = []
    for model, kept in _results_of(reproduction, panel, folder):
        for dataset in model.data:
            if kept is None or dataset not in kept.measured:
                rows.append([model.name, "", dataset, _not_measured(kept), *[""] * 6])
                continue
            found = kept.measured[dataset]
            printed = find(table="accuracy", method="TRIDENT", test_dataset=dataset, n_shot=kept.n_shot)
            beside = printed[0].printed if printed and kept.trained_order == "class_sorted" else ""
            steps = "; ".join(filter(None, [_steps(kept), model.remark]))
            trained = [ORDER_NAMES[kept.trained_order], str(kept.n_shot), dataset, steps, beside]
            training = _training_seconds(kept) if dataset == model.data[0] else ""
            seconds = [training, f"{found.source.seconds:.0f}"]
            rows.append([*trained, *_figures(found), *seconds])
    return headings, rows, _protocols(reproduction, panel, folder)


def _not_measured(kept: ModelResults | None) -> str:
    """Why there is no figure: a training that failed before the first validation has no weights to measure."""
    return kept.error if kept and kept.error and not kept.digest else "not run"


def _trained(kept: ModelResults) -> list[str]:
    steps = f"{kept.best_step or kept.steps:,} of {kept.paper_steps:,} steps"
    return [f"{ORDER_NAMES[kept.trained_order]}, {steps}", str(kept.n_shot)]


def _steps(kept: ModelResults) -> str:
    steps = f"{kept.steps:,} of {kept.paper_steps:,}"
    if kept.error and kept.digest:
        steps = f"stopped after {steps} ({kept.error})"
    best = "" if kept.best_step in (None, kept.steps) else f", measured after {kept.best_step:,}"
    return f"{steps}{best}"


def _training_seconds(kept: ModelResults) -> str:
    return f"{kept.training_seconds:.0f}" if kept.training_seconds else ""  # not known for included weights


def _once(seconds: float) -> Iterator[str]:
    """The seconds of a measurement, in the first of its rows only."""
    yield f"{seconds:.0f}"
    yield from repeat("")


def _figures(found: BothOrders) -> list[str]:
    both = [
        found.orders[order].figure if order in found.orders else f"no result: {found.problems[order]}"
        for order in ORDERS
    ]
    return [
        *both,
        "" if found.difference is None else plus_minus(found.difference, found.difference_ci95 or 0, sign="+"),
    ]


def _protocols(reproduction: Reproduction, panel: Panel, folder: Path) -> list[str]:
    """How ours were measured, once for each dataset and number of shots."""
    found: list[str] = []
    for model, kept in _results_of(reproduction, panel, folder):
        for dataset in panel.datasets_of(model):
            for one in kept.measured[dataset].orders.values() if kept and dataset in kept.measured else ():
                source = kept.measured[dataset].source  # type: ignore[union-attr]
                found.append(f"{one.described} ({_machine(source)}).")
    return list(dict.fromkeys(found))


def _machine(source: Source) -> str:
    return f"{source.device}, {source.engine} engine, {source.precision}"


def _calibration(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    metrics = list(dict.fromkeys([*(result.metric for result in paper_table(panel.paper).results), "brier"]))
    headings = ["trained on queries", "shots", "measured on queries", "temperature"]
    headings += [*("Brier score" if name == "brier" else name.upper() for name in metrics), "measuring, s"]
    rows: list[list[str]] = []
    for model, kept in _results_of(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.measured:
            rows.append([model.name, "", "not run", "", *[""] * len(metrics), ""])
            continue
        printed = {name: find(table=panel.paper, method="TRIDENT", metric=name, n_shot=kept.n_shot) for name in metrics}
        if kept.trained_order == "class_sorted":
            figures = [printed[name][0].printed if printed[name] else "" for name in metrics]
            published = ["published", str(kept.n_shot), ORDER_NAMES["class_sorted"], FITTED["paper"], *figures, ""]
            rows += [] if published in rows else [published]
        found = kept.measured[panel.dataset]
        seconds = _once(found.source.seconds)
        for order, measured in found.orders.items():
            for fitted, one in measured.calibration.items():
                said = FITTED[fitted] + (f": {one.temperature:.3g}" if fitted != "none" else "")
                ours = [f"{getattr(one, name):.4f}" for name in metrics]
                rows.append([*_trained(kept), ORDER_NAMES[order], said, *ours, next(seconds)])
        for order, problem in found.problems.items():
            rows.append([*_trained(kept), ORDER_NAMES[order], f"no result: {problem}", *[""] * len(metrics), ""])
    return headings, rows, _protocols(reproduction, panel, folder)


def _ablation(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["settings", "shots", "steps (of the paper's)", "parameters", "published, %"]
    headings += ["queries sorted by class, %", "the same queries shuffled, %", "difference, points", "training, s"]
    headings.append("measuring, s")
    rows = []
    for row, kept in ablation_rows(reproduction, panel, folder):
        said = ", ".join(text.partition(".")[2] for text in row.settings)
        published = row.paper.printed if row.paper else "none"
        if kept is None:
            rows.append([said, str(row.n_shot), "not run", "", published, *[""] * 5])
            continue
        both = kept.measured.get(row.model.data[0])
        ours = _figures(both) if both else [_not_measured(kept), "", ""]
        seconds = [_training_seconds(kept), f"{both.source.seconds:.0f}" if both else ""]
        rows.append([said, str(row.n_shot), _steps(kept), f"{kept.parameters:,}", published, *ours, *seconds])
    own = correlations(reproduction, [panel], folder)
    notes = [f"Spearman's rank correlation with the published figures, {one.describe()}." for one in own]
    if panel == next(one for one in reproduction.panels if one.kind == "ablation"):
        over_all = correlations(reproduction, [one for one in reproduction.panels if one.kind == "ablation"], folder)
        notes += [f"The same over all ablations with one shot, AttFEX's too, {one.describe()}." for one in over_all]
    return headings, rows, [*notes, *_protocols(reproduction, panel, folder)]


def _latents(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["trained on queries", "shots", "measured on queries", "latent", "before", "after", "change"]
    headings.append("measuring, s")
    rows, notes = [], ["Davies-Bouldin scores in the latents' own space: lower means better separated classes."]
    for model, kept in _results_of(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.latents:
            rows.append([model.name, "", "not run", *[""] * 5])
            continue
        found = kept.latents[panel.dataset]
        seconds = _once(found.source.seconds)
        for order, scores in found.scores.items():
            trained = [*_trained(kept), ORDER_NAMES[order]]
            for name, one in scores["davies_bouldin"].items():
                change = plus_minus(one["change"], one["change_ci95"], 3, "+")
                both = [f"{one['before']:.3f}", f"{one['after']:.3f}"]
                rows.append([*trained, f"z_{name}", *both, change, next(seconds)])
            notes.append(f"{scores['protocol']} ({_machine(found.source)}).")
    return headings, rows, list(dict.fromkeys(notes))


def _reconstructions(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["trained on queries", "shots", "measured on queries", "decoder's squared error"]
    headings += ["error of the task's mean image", "ratio, mean over tasks", "measuring, s"]
    rows, notes = [], []
    for model, kept in _results_of(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.reconstructions:
            rows.append([model.name, "", "not run", *[""] * 4])
            continue
        found = kept.reconstructions[panel.dataset]
        seconds = _once(found.source.seconds)
        for order, one in found.orders.items():
            errors = [f"{one.squared_error:.0f}", f"{one.squared_error_of_mean:.0f}"]
            ratio = plus_minus(one.mean_ratio, one.mean_ratio_ci95, 3)
            rows.append([*_trained(kept), ORDER_NAMES[order], *errors, ratio, next(seconds)])
        notes.append(f"{found.protocol}; the same with the other order; 95 % intervals ({_machine(found.source)}).")
    return headings, rows, list(dict.fromkeys(notes))
