"""Recipes and training: `trident recipes`, `params` and `train`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trident.cli.app import app
from trident.cli.options import (
    SETTINGS,
    Device,
    EngineName,
    Json,
    PrecisionName,
    Settings,
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
    from typing import get_args, get_origin

    from trident.recipes import load_recipe, recipe_names, recipe_values, setting_help, setting_types

    if name is None:
        for known in recipe_names():
            print(f"{known:19} {load_recipe(known).summary}")
        return
    recipe = load_recipe(name)
    values = recipe_values(recipe)
    print(f"{recipe.name}: {recipe.summary}\n")
    choices = {key: get_args(hint) for key, hint in setting_types() if get_origin(hint) is Literal}
    for key, help_text in setting_help().items():
        section, setting = key.split(".")
        help_text += f" [{'|'.join(choices[key])}]" if key in choices else ""
        print(f"{key + '=' + _shown(values[section][setting]):44} {help_text}")


@app.command(context_settings=SETTINGS, short_help="Count the parameters of a network.")
def params(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a TOML file.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Count the parameters of a recipe's network, part by part."""
    from trident.engines.execution import make_model
    from trident.recipes import load_recipe

    loaded = load_recipe(recipe, overrides_of(settings))
    parts: dict[str, int] = {}
    for key, value in make_model(loaded).initial(0).items():
        part = ".".join(key.split(".")[:2]) if key.startswith(("label.", "semantic.")) else key.split(".")[0]
        parts[part] = parts.get(part, 0) + value.numel()
    total = sum(parts.values())
    if as_json:
        print(json.dumps({"recipe": loaded.name, "total": total, "parts": parts}))
        return
    for part, count in [*parts.items(), ("total", total)]:
        print(f"{part:20} {count:>9,}")


@app.command(context_settings=SETTINGS, short_help="Meta-train a model.")
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name, or the path of a TOML file.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run's files; made if need be.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Begin with the trained weights of this run, as far as the networks agree.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
) -> None:
    """Meta-train a model. Ctrl-C saves and stops; --resume goes on where it stopped, bit for bit."""
    words = [word for word in [recipe, *(settings or [])] if word is not None]
    if resume is not None:
        if out is not None:
            raise TridentError("--resume RUN goes on in the run's own folder: leave --out away")
        if start_from is not None:
            raise TridentError("--resume RUN goes on with the run's own weights: leave --start-from away")
        _resume(resume, overrides_of(words), data, device, engine, precision)
        return
    if recipe is None or "=" in recipe or recipe.startswith("-"):
        raise TridentError("which recipe? 'trident recipes' lists them, for example: trident train glyphs --out RUN")
    if out is None:
        raise TridentError("where to? Give --out RUN, a folder for the run's files")
    from trident.recipes import load_recipe

    loaded = load_recipe(recipe, overrides_of(settings))
    source = data_of(loaded, data, None)
    store, device = open_data(source), device_of(device)
    from trident.learning.checkpoint import load_checkpoint
    from trident.learning.run_start import start_run

    weights = None if start_from is None else load_checkpoint(start_from)
    start = start_run(loaded, store, source, out, device, engine, precision, weights)
    _train(start, store, out, device, engine, precision)


def _resume(run: Path, overrides: list[str], data: str | None, device: str, engine: str, precision: str) -> None:
    from dataclasses import replace

    from trident.learning.checkpoint import LAST, load_checkpoint
    from trident.learning.run_start import check_resumable, resume_run
    from trident.recipes import with_overrides

    if not run.is_dir():
        raise TridentError(f"there is no run at {run}: --resume takes the folder given to --out before")
    checkpoint = load_checkpoint(run / LAST)
    recipe = with_overrides(checkpoint.recipe, overrides)
    check_resumable(checkpoint.recipe, recipe)
    checkpoint = replace(checkpoint, recipe=recipe)
    store = open_data(data_of(recipe, data, checkpoint))
    _train(resume_run(checkpoint, store, run), store, run, device_of(device), engine, precision)


def _train(start: "Checkpoint", store: "ImageStore", out: Path, device: str, engine: str, precision: str) -> None:
    from trident.cli.console import TrainingProgress, stderr
    from trident.learning.training import train as run_training

    steps = start.recipe.training.steps
    with TrainingProgress(start.step, steps) as progress:
        end = run_training(start, store, out, device, progress, engine, precision)
    if end.step < steps:
        stderr.print(f"stopped after step {end.step}; go on with: trident train --resume {out}", soft_wrap=True)
        raise typer.Exit(130)
    best = f"; best validation {end.best['accuracy']:.2f} % at step {end.best['step']}" if end.best else ""
    stderr.print(f"trained {end.step} steps{best}. Files in {out}", soft_wrap=True)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
