"""Trains and measures what the panels still lack."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from studies.reproduction.measuring import both_orders, latents, reconstructed
from studies.reproduction.panels import Model, Panel, Reproduction
from studies.reproduction.paper_results import paper_training
from studies.reproduction.results import FOLDER, ModelResults, Part, part_of, read, update_results
from studies.reproduction.states import is_complete
from trident.data.store import ImageStore
from trident.files import short_digest
from trident.grids.files import Paper
from trident.grids.grid import RESULT, Cell, Grid, read_results
from trident.grids.running import GridRun
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint
from trident.learning.run_log import read_log
from trident.learning.training import Observer
from trident.measuring.record import FILE_NAME, change_line, read_lines
from trident.nn.parameters import count
from trident.progress import Progress
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.settings import require


@dataclass(frozen=True)
class Runner:
    """Trains and measures models: the data, the folders of runs and results, and how to show progress."""

    stores: dict[str, tuple[str, ImageStore]]  # by dataset: how to find it again, and the store
    runs: Path  # folder of trainings
    results: Path
    fresh: bool  # whether to ignore the included results
    device: str
    budget: float
    say: Callable[[str], None]
    training_bar: Callable[[int, int], AbstractContextManager[Observer]]
    bar: Callable[[str], AbstractContextManager[Progress]]

    def store(self, dataset: str) -> ImageStore:
        given = [name for name in self.stores if name != "glyphs"]
        found = f"; the stores given hold {' and '.join(given)}" if given else ""
        option = "--cub" if dataset == "cub" else "--data"
        require(dataset in self.stores, f"this needs the store of {dataset}: give it with {option} STORE{found}")
        return self.stores[dataset][1]

    def prepare(self) -> None:
        """Make the folder of results. Unless this is a fresh start, copy the included results into it."""
        require(not self.results.is_file(), f"--results {self.results} is a file: it must be a folder")
        self.results.mkdir(parents=True, exist_ok=True)
        included = {} if self.fresh else read_lines(FOLDER / FILE_NAME)
        for name, values in included.items():
            if read(name, self.results) is None:
                change_line(self.results / FILE_NAME, name, lambda _, values=values: values)  # type: ignore[misc]

    def complete(self, panel: Panel, model: Model, dataset: str, tasks: int) -> bool:
        kept, store = read(model.name, self.results), self.stores.get(dataset)
        if kept is None and not self.fresh:
            kept = read(model.name, FOLDER)
        fingerprint = store[1].fingerprint if store else None
        return kept is not None and is_complete(kept, panel, model, dataset, tasks, self.budget, fingerprint)

    def grid(self, models: list[Model]) -> Grid:
        """The trainings as cells of a grid, so that they are locked, resumed and spread like those."""
        cells = [Cell(model.run_name(self.budget), model.trained_recipe(self.budget)) for model in models]
        return Grid("reproduction", "trainings of the paper", {}, cells, None, Paper())

    def training(self, models: list[Model]) -> GridRun:
        """The trainings of some models on one dataset."""
        (dataset,) = {model.data[0] for model in models}
        source, store = self.stores[dataset]
        grid = self.grid(models)
        return GridRun(grid, store, source, self.runs, self.device, self.say, self.training_bar, self.bar)

    def measure(self, reproduction: Reproduction, panel: Panel, model: Model, dataset: str) -> None:
        """Measure one model on one dataset and keep the result."""
        fresh, checkpoint = self._model(model)
        tasks, part = reproduction.tasks[dataset], part_of(panel.kind)
        if checkpoint is not None:
            _check_store(checkpoint, self.store(dataset))
            found = self._measured(panel, model, checkpoint, dataset, tasks)
            update_results(model.name, lambda kept: _extended(kept, fresh, part, dataset, found), self.results)
        else:
            update_results(model.name, lambda kept: _newer(kept, fresh), self.results)

    def _measured(self, panel: Panel, model: Model, checkpoint: Checkpoint, dataset: str, tasks: int) -> Part:
        store = self.store(dataset)
        with self.bar(f"{model.name} on {dataset}") as progress:
            if panel.kind == "latents":
                return latents(checkpoint, store, tasks, self.device, progress)
            if panel.kind == "reconstructions":
                return reconstructed(checkpoint, store, tasks, self.device, progress)
            return both_orders(checkpoint, store, self.store(model.data[0]), tasks, self.device, progress)

    def _model(self, model: Model) -> tuple[ModelResults, Checkpoint | None]:
        """What is to be kept of a model, and its weights; None if its training failed before the first validation."""
        if model.weights:
            checkpoint = load_checkpoint(model.weights)
            return _about(model, checkpoint.recipe, 0, checkpoint, checkpoint), checkpoint
        name = model.run_name(self.budget)
        folder, recipe = self.runs / name, model.trained_recipe(self.budget)
        results = read_results(self.grid([model]), self.runs)
        require(name in results, f"{folder / RESULT} is missing: this training is not finished")
        result, asked = results[name], recipe.training.steps
        last = load_checkpoint(folder / LAST)
        error = _reason(result.error) if result.error else None
        best = load_checkpoint(folder) if error is None or (folder / BEST).is_file() else None
        about = _about(model, recipe, asked, last, best)
        device = str(last.provenance.get("device_name", last.provenance.get("device", "")))
        about = replace(about, error=error, training_seconds=training_seconds(folder), training_device=device)
        return (about if best else replace(about, digest="")), best


def training_seconds(run: Path) -> float | None:
    """Without validation. A line of the log has the mean seconds of the steps since the line before it."""
    seconds, before = 0.0, 0
    for line in read_log(run / LAST):
        if line["kind"] == "train":
            seconds += line["seconds"] * (line["step"] - before)
            before = line["step"]
    return seconds if before else None


def _reason(error: str) -> str:
    """What went wrong, without the step, which counts from the start of this run, and without the advice."""
    return error.partition(". ")[0].partition(": ")[2]


def _about(model: Model, recipe: Recipe, asked: int, last: Checkpoint, best: Checkpoint | None) -> ModelResults:
    measured = best or last
    assert measured.path is not None
    return ModelResults(
        made_from=model.made_from,
        digest=short_digest(measured.path),
        n_shot=recipe.episode.n_shot,
        trained_order=recipe.protocol.query_order,
        asked_steps=asked,
        steps=last.all_steps,
        best_step=best.all_steps if best else None,
        paper_steps=_paper_steps(model, recipe),
        parameters=count(measured.parameters),
    )


def _paper_steps(model: Model, recipe: Recipe) -> int:
    """Training steps in the paper: of the recipe, or for weights, of the paper's training with as many shots."""
    if model.recipe:
        return load_recipe(model.recipe).training.steps
    wanted = (recipe.dataset, recipe.episode.n_shot)
    runs = [run for run in paper_training() if (run.train_dataset, run.n_shot) == wanted]
    require(bool(runs), f"the paper has no training on {wanted[0]} with {wanted[1]} shots, as {model.weights} had")
    return load_recipe(runs[0].recipe).training.steps


def _check_store(checkpoint: Checkpoint, store: ImageStore) -> None:
    """Weights must not be measured on another split of the data that they were trained on."""
    trained = checkpoint.provenance
    if trained.get("dataset") == store.dataset and trained.get("fingerprint"):
        same = trained["fingerprint"] == store.fingerprint
        require(same, f"the store of {store.dataset} is not the one trained on: its fingerprint is another")


def _newer(kept: ModelResults | None, fresh: ModelResults) -> ModelResults:
    """What is known of a model after it was made again. Results of more steps are never replaced by those of fewer."""
    if kept is None:
        return fresh
    if (kept.made_from, kept.digest) == (fresh.made_from, fresh.digest):
        return replace(fresh, measured=kept.measured, latents=kept.latents, reconstructions=kept.reconstructions)
    longer = kept.made_from == fresh.made_from and bool(kept.digest) and kept.steps > fresh.steps
    require(not longer, f"results of {kept.steps:,} steps are kept, and those of {fresh.steps:,} do not replace them")
    return fresh


def _extended(kept: ModelResults | None, fresh: ModelResults, part: str, dataset: str, found: Part) -> ModelResults:
    newer = _newer(kept, fresh)
    return replace(newer, **{part: getattr(newer, part) | {dataset: found}})
