"""Recipes and training: `trident recipes`, `params` and `train`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli.app import app
from trident.cli.options import (
    SETTINGS,
    Device,
    EngineName,
    Json,
    PrecisionName,
    Settings,
    StoreOn,
    data_of,
    device_of,
    open_data,
    overrides_of,
)
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.data.store import ImageStore
    from trident.learning.checkpoint import Checkpoint


@app.command(short_help="List the recipes, or explain one.")
def recipes(name: Annotated[str | None, typer.Argument(help="A recipe: show all its settings.")] = None) -> None:
    """List the recipes, or show every setting of one with its meaning."""
    from trident.recipes.files import read_recipe, recipe_names

    if name is None:
        width = max(map(len, recipe_names()))
        for known in recipe_names():
            print(f"{known:{width}} {read_recipe(known)[0]['summary']}")
        return
    from trident.cli.settings import print_settings
    from trident.recipes.loading import load_recipe

    recipe = load_recipe(name)
    print(f"{recipe.name}: {recipe.summary}\n")
    print_settings(recipe)


@app.command(context_settings=SETTINGS, short_help="Count the parameters of a network.")
def params(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a TOML file.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Count the parameters of a recipe's network, part by part."""
    from trident.nn.parameters import count_by_part
    from trident.recipes.loading import load_recipe

    loaded = load_recipe(recipe, overrides_of(settings))
    parts = count_by_part(loaded.shapes())
    total = sum(parts.values())
    if as_json:
        print(json.dumps({"recipe": loaded.name, "total": total, "parts": parts}))
        return
    for part, count in [*parts.items(), ("total", total)]:
        print(f"{part:20} {count:>9,}")


@app.command(context_settings=SETTINGS, short_help="Train a model.")
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name, or the path of a TOML file.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run's files; created if missing.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Start from this run's trained weights, where the networks match."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
    store_on: StoreOn = "auto",
) -> None:
    """Train a model. Ctrl-C saves and stops; --resume continues with bit-identical results."""
    words = [word for word in [recipe, *(settings or [])] if word is not None]
    if resume is not None:
        if out is not None:
            raise TridentError("--resume RUN continues in the run's folder: omit --out")
        if start_from is not None:
            raise TridentError("--resume RUN continues with the run's weights: omit --start-from")
        _resume(resume, overrides_of(words), data, device, engine, precision, store_on)
        return
    if recipe is None or "=" in recipe or recipe.startswith("-"):
        raise TridentError("which recipe? 'trident recipes' lists them, for example: trident train glyphs --out RUN")
    if out is None:
        raise TridentError("no output folder: give --out RUN, a folder for the run's files")
    from trident.recipes.loading import load_recipe

    loaded = load_recipe(recipe, overrides_of(settings))
    source = data_of(loaded, data, None)
    store, device = open_data(source, store_on), device_of(device)
    from trident.learning.checkpoint import load_checkpoint
    from trident.learning.run_start import start_run

    weights = None if start_from is None else load_checkpoint(start_from)
    start = start_run(loaded, store, source, out, device, engine, precision, weights)
    _train(start, store, out, device, engine, precision)


def _resume(
    run: Path, overrides: list[str], data: str | None, device: str, engine: str, precision: str, store_on: str
) -> None:
    from dataclasses import replace

    from trident.learning.checkpoint import LAST, load_checkpoint
    from trident.learning.run_start import check_resumable, resume_run
    from trident.recipes.loading import with_overrides

    if not run.is_dir():
        raise TridentError(f"there is no run at {run}: --resume takes the folder given to --out before")
    checkpoint = load_checkpoint(run / LAST)
    recipe = with_overrides(checkpoint.recipe, overrides)
    check_resumable(checkpoint.recipe, recipe)
    checkpoint = replace(checkpoint, recipe=recipe)
    store = open_data(data_of(recipe, data, checkpoint), store_on)
    _train(resume_run(checkpoint, store, run), store, run, device_of(device), engine, precision)


def _train(start: "Checkpoint", store: "ImageStore", out: Path, device: str, engine: str, precision: str) -> None:
    from trident.cli.console import TrainingProgress, stderr
    from trident.learning.training import train as run_training
    from trident.measuring.validation import validate

    steps = start.recipe.training.steps
    with TrainingProgress(start.step, steps) as progress:
        end = run_training(start, store, out, device, progress, validate, engine, precision)
    if end.step < steps:
        stderr.print(f"stopped after step {end.step}; go on with: trident train --resume {out}", soft_wrap=True)
        raise typer.Exit(130)
    best = f"; best validation {end.best['accuracy']:.2f} % at step {end.best['step']}" if end.best else ""
    stderr.print(f"trained {end.step} steps{best}. Files in {out}", soft_wrap=True)
