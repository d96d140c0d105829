"""The tables that come out of the recipes: parameters, hyper-parameters and what trainings cost."""

from pathlib import Path

from studies.reproduction.panels import Panel, Reproduction
from studies.reproduction.paper_results import paper_table, paper_training, paper_training_notes
from studies.reproduction.results import ModelResults, read
from trident.nn.parameters import count_by_part
from trident.recipes.loading import formatted, load_recipe, setting_of

# Parts of the network as the paper counts them, and ours that make them up.
PARTS = {
    "label encoder: Conv4": "backbone",
    "label encoder: AttFEX": "attfex",
    "semantic encoder: Conv4": "semantic_encoder",
    "classifier": "classifier",
    "decoder": "decoder",
}

Table = tuple[list[str], list[list[str]], list[str]]  # headings, rows, notes


def parameters_table(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    five_shots = count_by_part(load_recipe("mini-5w5s").shapes())
    one_shot = count_by_part(load_recipe("tiered-5w1s").shapes())  # its decoder has batch norm, as counted in the paper
    rows = []
    for result in paper_table(panel.paper).results:
        if result.method != "TRIDENT" or result.part is None:
            continue
        side, _, what = result.part.partition(": ")
        if result.part in PARTS:
            ours = five_shots[PARTS[result.part]]
        elif what in ("mean head", "variance head"):
            ours = five_shots["label" if side == "label encoder" else "semantic"] // 2
        else:
            ours = sum((five_shots if result.n_shot == 5 else one_shot).values())
        rows.append([result.part, result.printed, f"{ours:,}", result.note])
    return ["part", "published", "ours", ""], rows, list(paper_table(panel.paper).notes)


def training_table(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    runs = paper_training()
    recipes = [load_recipe(run.recipe) for run in runs]
    keys = [text.partition("=")[0] for text in runs[0].settings]
    published = [dict(text.split("=") for text in run.settings) for run in runs]
    rows = []
    for key in keys:
        ours = [formatted(setting_of(recipe, key)) for recipe in recipes]
        cells = [theirs[key] for theirs in published]
        rows.append([key, *(f"{a} / {b}" for a, b in zip(cells, ours, strict=True))])
    costs = [one for one in _trainings(reproduction, folder) if one.training_seconds]
    notes = ["Published / our recipe. The other tables say how many steps ours were trained.", *paper_training_notes()]
    if costs:
        hours = sum(one.training_seconds or 0 for one in costs) / 3600
        devices = ", ".join(dict.fromkeys(one.training_device for one in costs))
        notes.append(f"The {len(costs)} trainings here took {hours:.1f} hours on {devices}, validation left out.")
    return ["setting", *(run.recipe for run in runs)], rows, notes


def _trainings(reproduction: Reproduction, folder: Path) -> list[ModelResults]:
    names = {model.name for panel in reproduction.panels for model in reproduction.models_of(panel) if model.recipe}
    return [kept for name in sorted(names) if (kept := read(name, folder)) is not None]
