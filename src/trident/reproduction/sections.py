"""The kept results as tables: one section for each panel, for the document and for the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trident.nn.parameters import count_by_part
from trident.recipes.loading import load_recipe, setting_of, shown
from trident.report.paper_results import PaperResult, find, paper_table, paper_training, paper_training_notes
from trident.reproduction.panels import AblationRow, Model, Panel, Reproduction
from trident.reproduction.results import ORDERS, BothOrders, Kept, read
from trident.reproduction.running import state

ORDER_NAMES = {"class_sorted": "sorted by class", "shuffled": "shuffled"}
FITTED = {"none": "no temperature", "validation": "fitted on validation tasks", "paper": "fitted on the scored tasks"}
# How each dataset's store is given on the command line.
STORES = {"mini-imagenet": "--data mini.store", "cub": "--cub cub.store", "tiny-imagenet": "--data tiny.store"}
STAND_IN = {"tiny-imagenet": "tiered-imagenet"}  # whose published figures stand beside it
# Parts of the network as the paper counts them, and ours that make them up.
PARTS = {
    "label encoder: Conv4": "backbone",
    "label encoder: AttFEX": "attfex",
    "semantic encoder: Conv4": "semantic_encoder",
    "classifier": "classifier",
    "decoder": "decoder",
}


@dataclass(frozen=True)
class Section:
    panel: Panel
    state: str
    command: str  # that runs what is missing; empty if there is nothing to run
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of our accuracies with the published ones."""

    order: str
    rho: float
    p_value: float
    rows: int

    def describe(self) -> str:
        return f"{ORDER_NAMES[self.order]}: {self.rho:+.2f} ({self.rows} rows, p = {self.p_value:.2f})"


def sections(reproduction: Reproduction, folder: Path) -> list[Section]:
    return [section(reproduction, panel, folder) for panel in reproduction.panels]


def section(reproduction: Reproduction, panel: Panel, folder: Path) -> Section:
    makers = {
        "drawing": _drawing,
        "accuracy": _accuracy,
        "parameters": _parameters,
        "calibration": _calibration,
        "ablation": _ablation,
        "latents": _latents,
        "reconstructions": _reconstructions,
        "training": _training,
    }
    headings, rows, notes = makers[panel.kind](reproduction, panel, folder)
    if panel.note:
        notes = [panel.note, *notes]
    command = _command(reproduction, panel)
    return Section(panel, state(reproduction, panel, folder), command, headings, rows, notes)


def _command(reproduction: Reproduction, panel: Panel) -> str:
    models = reproduction.models_of(panel)
    needed = {name for model in models for name in (model.data[0], *reproduction.datasets_of(panel, model))}
    options = [
        STORES.get(name, f"--data {name}")
        for name in sorted(needed, key=lambda name: (name not in STORES, name == "cub", name))
    ]
    return " ".join(["trident reproduce", panel.name, *options]) if models else ""


Table = tuple[list[str], list[list[str]], list[str]]  # headings, rows, notes


def _drawing(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    return [], [], []


def _kept(reproduction: Reproduction, panel: Panel, folder: Path) -> Iterator[tuple[Model, Kept | None]]:
    for model in reproduction.models_of(panel):
        yield model, read(model.name, folder)


def _accuracy(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["trained on queries", "shots", "measured on", "steps, of the paper's", "published, %"]
    headings += ["sorted by class, %", "the same queries shuffled, %", "sorting brings, points", "seconds"]
    rows = []
    for model, kept in _kept(reproduction, panel, folder):
        for dataset in model.data:
            if kept is None or dataset not in kept.measured:
                rows.append([model.name, "", dataset, "not run", *[""] * 5])
                continue
            found = kept.measured[dataset]
            where = STAND_IN.get(dataset, dataset)
            printed = find(table="accuracy", method="TRIDENT", test_dataset=where, n_shot=kept.n_shot)
            rows.append(
                [
                    ORDER_NAMES[kept.trained_order],
                    str(kept.n_shot),
                    dataset,
                    _steps(kept),
                    printed[0].printed if printed else "",
                    *_figures(found),
                    f"{found.seconds:.0f}",
                ]
            )
    return headings, rows, [*_protocols(reproduction, panel, folder)]


def _steps(kept: Kept) -> str:
    best = "" if kept.best_step in (None, kept.steps) else f", measured after {kept.best_step:,}"
    return f"{kept.steps:,} of {kept.paper_steps:,}{best}"


def _figures(found: BothOrders) -> list[str]:
    both = [f"{one.accuracy:.2f} ± {one.ci95:.2f}" for one in (found.orders[order] for order in ORDERS)]
    return [*both, f"{found.difference:+.2f} ± {found.difference_ci95:.2f}"]


def _protocols(reproduction: Reproduction, panel: Panel, folder: Path) -> list[str]:
    """How ours were measured, once for each dataset and number of shots."""
    found = {}
    for model, kept in _kept(reproduction, panel, folder):
        for dataset in reproduction.datasets_of(panel, model):
            if kept is not None and dataset in kept.measured:
                both = kept.measured[dataset]
                found[both.orders["class_sorted"].protocol] = both.device
    return [f"{protocol}; and the same with shuffled queries ({device})." for protocol, device in found.items()]


def _calibration(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    metrics = list(dict.fromkeys(result.metric for result in paper_table(panel.paper).results))
    headings = ["trained on queries", "shots", "measured on queries", "temperature"]
    headings += [name.upper() for name in metrics]
    rows = []
    for model, kept in _kept(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.measured:
            rows.append([model.name, "", "not run", "", *[""] * len(metrics)])
            continue
        printed = {name: find(table=panel.paper, method="TRIDENT", metric=name, n_shot=kept.n_shot) for name in metrics}
        if kept.trained_order == "class_sorted":
            figures = [printed[name][0].printed if printed[name] else "" for name in metrics]
            rows.append(["published", str(kept.n_shot), ORDER_NAMES["class_sorted"], FITTED["paper"], *figures])
        for order in ORDERS:
            found = kept.measured[panel.dataset].orders[order].calibration
            for fitted, one in found.items():
                said = FITTED[fitted] + (f": {one.temperature:.3g}" if fitted != "none" else "")
                ours = [f"{getattr(one, name):.4f}" for name in metrics]
                rows.append([ORDER_NAMES[kept.trained_order], str(kept.n_shot), ORDER_NAMES[order], said, *ours])
    return headings, rows, _protocols(reproduction, panel, folder)


def _ablation(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["settings", "shots", "steps, of the paper's", "parameters", "published, %"]
    headings += ["sorted by class, %", "the same queries shuffled, %", "sorting brings, points", "training, s"]
    rows = []
    for row, kept in ablation_rows(reproduction, panel, folder):
        said = ", ".join(text.partition(".")[2] for text in row.settings)
        published = row.paper.printed if row.paper else "none"
        if kept is None:
            rows.append([said, str(row.n_shot), "not run", "", published, *[""] * 4])
            continue
        both = kept.measured.get(row.model.data[0])
        ours = _figures(both) if both else [kept.error or "not measured", "", ""]
        seconds = f"{kept.training_seconds:.0f}" if kept.training_seconds else ""
        rows.append([said, str(row.n_shot), _steps(kept), f"{kept.parameters:,}", published, *ours, seconds])
    found = correlations(reproduction, panel, folder)
    notes = [f"Spearman's rank correlation with the published figures, {one.describe()}." for one in found]
    return headings, rows, [*notes, *_protocols(reproduction, panel, folder)]


def ablation_rows(reproduction: Reproduction, panel: Panel, folder: Path) -> Iterator[tuple[AblationRow, Kept | None]]:
    for row in reproduction.ablation(panel):
        yield row, read(row.model.name, folder)


def published_and_ours(
    reproduction: Reproduction, panel: Panel, folder: Path, order: str
) -> list[tuple[PaperResult, float]]:
    """The rows of an ablation that have both figures."""
    pairs = []
    for row, kept in ablation_rows(reproduction, panel, folder):
        found = kept.measured.get(row.model.data[0]) if kept else None
        if row.paper is not None and found is not None:
            pairs.append((row.paper, found.orders[order].accuracy))
    return pairs


def correlations(reproduction: Reproduction, panel: Panel, folder: Path) -> list[Correlation]:
    """With sorted and with shuffled queries; none with fewer than three rows."""
    from scipy.stats import spearmanr

    found = []
    for order in ORDERS:
        pairs = published_and_ours(reproduction, panel, folder, order)
        if len(pairs) >= 3:
            rho, p_value = spearmanr([printed.value for printed, _ in pairs], [ours for _, ours in pairs])
            found.append(Correlation(order, float(rho), float(p_value), len(pairs)))
    return found


def _latents(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = ["trained on queries", "shots", "latent", "before", "after", "change"]
    rows, notes = [], []
    for model, kept in _kept(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.latents:
            rows.append([model.name, "", "not run", "", "", ""])
            continue
        scores = kept.latents[panel.dataset].scores
        for name, one in scores["davies_bouldin"].items():
            change = f"{one['change']:+.3f} ± {one['change_ci95']:.3f}"
            trained = ORDER_NAMES[kept.trained_order]
            rows.append([trained, str(kept.n_shot), f"z_{name}", f"{one['before']:.3f}", f"{one['after']:.3f}", change])
        notes.append(f"{scores['verdict']} {scores['protocol']}.")
    notes.append("Davies-Bouldin scores in the latents' own space: lower means better separated classes.")
    return headings, rows, notes


def _reconstructions(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    headings = [
        "trained on queries",
        "shots",
        "squared error of an image",
        "of the task's mean image",
        "ratio",
        "tasks",
    ]
    rows, notes = [], []
    for model, kept in _kept(reproduction, panel, folder):
        if kept is None or panel.dataset not in kept.reconstructions:
            rows.append([model.name, "", "not run", "", "", ""])
            continue
        one = kept.reconstructions[panel.dataset]
        errors = [f"{one.squared_error:.0f}", f"{one.squared_error_of_mean:.0f}"]
        ratio = f"{one.ratio:.3f} ± {one.ratio_ci95:.3f}"
        rows.append([ORDER_NAMES[kept.trained_order], str(kept.n_shot), *errors, ratio, str(one.tasks)])
        notes.append(f"{one.protocol}.")
    return headings, rows, notes


def _parameters(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    counts = {shot: count_by_part(load_recipe(f"mini-5w{shot}s").initial(0)) for shot in (1, 5)}
    with_norm = count_by_part(load_recipe("tiered-5w1s").initial(0))
    rows = []
    for result in paper_table(panel.paper).results:
        if result.method != "TRIDENT" or result.part is None:
            continue
        side, _, what = result.part.partition(": ")
        if result.part in PARTS:
            ours = counts[5][PARTS[result.part]]
        elif what in ("mean head", "variance head"):
            ours = counts[5]["label" if side == "label encoder" else "semantic"] // 2
        else:
            ours = sum((counts[5] if result.n_shot == 5 else with_norm).values())
        rows.append([result.part, result.printed, f"{ours:,}", result.note])
    return ["part", "published", "ours", ""], rows, list(paper_table(panel.paper).notes)


def _training(reproduction: Reproduction, panel: Panel, folder: Path) -> Table:
    runs = paper_training()
    recipes = [load_recipe(run.recipe) for run in runs]
    keys = [text.partition("=")[0] for text in runs[0].settings]
    published = [dict(text.split("=") for text in run.settings) for run in runs]
    rows = []
    for key in keys:
        ours = [shown(setting_of(recipe, key)) for recipe in recipes]
        cells = [theirs[key] for theirs in published]
        rows.append([key, *(f"{a} / {b}" for a, b in zip(cells, ours, strict=True))])
    costs = [one for one in _trainings(reproduction, folder) if one.training_seconds]
    notes = ["Published / ours.", *paper_training_notes()]
    if costs:
        hours = sum(one.training_seconds or 0 for one in costs) / 3600
        devices = ", ".join(dict.fromkeys(one.training_device for one in costs))
        notes.append(f"The {len(costs)} trainings here took {hours:.1f} hours on {devices}, validation left out.")
    return ["setting", *(run.recipe for run in runs)], rows, notes


def _trainings(reproduction: Reproduction, folder: Path) -> list[Kept]:
    names = {model.name for panel in reproduction.panels for model in reproduction.models_of(panel) if model.recipe}
    return [kept for name in sorted(names) if (kept := read(name, folder)) is not None]
