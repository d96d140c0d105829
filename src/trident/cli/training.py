"""Methods, recipes and training: `trident methods`, `recipes` and `train`."""

import itertools
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError, one_line
from trident.methods.registry import About, about, check_method, method_paths

if TYPE_CHECKING:
    from trident.data.store import ImageStore
    from trident.learning.checkpoint import Checkpoint
    from trident.recipes.recipe import Recipe

FACTS = ("queries classified", "trained on", "classes in a task", "latents", "published")
TRAINED_ON = {"episodes": "tasks", "classes": "batches of all training classes", "nothing": "nothing"}


@app.command(short_help="List the methods, or explain one.")
def methods(
    name: Annotated[str | None, typer.Argument(help="A method: explain it and its settings.")] = None,
    as_json: opt.Json = False,
) -> None:
    """List the few-shot methods, or explain one with its settings.

    A recipe chooses a method by the name in its [method] table; the other keys of that table are the method's settings.
    """
    if name is not None:
        check_method(name)
        _explain(name, as_json)
        return
    known = {}
    for method in method_paths():
        try:
            known[method] = about(method)
        except TridentError as error:  # one of another package cannot be imported
            print(f"trident: {one_line(str(error))}", file=sys.stderr)
    if as_json:
        opt.print_json([_values(method, facts) for method, facts in known.items()])
        return
    rows = [(method, *_facts(facts)) for method, facts in known.items()]
    print("\n".join(opt.aligned([("method", *FACTS), *rows])))
    print("\nTransductive batch norm (protocol.batch_norm), as in MAML's recipes, sees all queries of a task.")


def _explain(name: str, as_json: bool) -> None:
    from trident.engines.learners import learners_of
    from trident.methods.registry import method_class
    from trident.recipes.recipe import Recipe

    method = method_class(name)()
    facts, engines = method.about, list(learners_of(type(method)))
    if as_json:
        opt.print_json({**_values(name, facts), "engines": engines})
        return
    print(f"{name}: {facts.title} ({facts.citation}, {facts.paper})\n")
    print(textwrap.dedent(f"    {type(method).__doc__}").strip())
    print()
    for fact, value in zip((*FACTS, "engines"), (*_facts(facts), " and ".join(engines)), strict=True):
        print(f"{fact}: {value}")
    print("\nSettings of the [method] table, with their defaults:\n")
    opt.print_settings(Recipe(name, "", "", method=method), "method")


def _values(name: str, facts: About) -> dict[str, object]:
    values = {key: value for key, value in asdict(facts).items() if key != "analyses"}
    return {"name": name, **values, "latents": "latents" in facts.analyses}


def _facts(facts: About) -> tuple[str, ...]:
    return (
        "together (transductive)" if facts.transductive else "each alone (inductive)",
        TRAINED_ON[facts.trained_on],
        "any number" if facts.any_way else "as in training",
        "yes" if "latents" in facts.analyses else "no",
        facts.citation,
    )


HEADINGS = {  # of the list of recipes, by how their names begin
    "features": "Methods on features of a frozen network, with little or nothing to train",
    "glyphs": "The embedded glyphs, minutes on a laptop",
    "mini": "miniImageNet",
    "tiered": "tieredImageNet",
}


@app.command(context_settings=opt.SETTINGS, short_help="List the recipes, or explain one.")
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, or the path of a TOML file.")] = None,
    settings: opt.Settings = None,
    as_json: opt.Json = False,
) -> None:
    """List the recipes, or show all settings of one and count its network's parameters, part by part."""
    from trident.recipes.files import read_recipe, recipe_names

    if name is None:
        summaries = {known: read_recipe(known)[0]["summary"] for known in recipe_names()}
        if as_json:
            opt.print_json([{"name": known, "summary": summary} for known, summary in summaries.items()])
            return
        width = max(map(len, summaries))
        for kind, names in itertools.groupby(summaries, lambda known: known.partition("-")[0]):
            print(f"{HEADINGS.get(kind, kind)}:\n")
            for known in names:
                print(f"  {known:{width}} {summaries[known]}")
            print()
        print("Begin with 'trident train glyphs': it needs no data. 'trident recipes glyphs' explains its settings.")
        return
    read_recipe(name)  # a wrong name is reported before torch is imported
    from trident.nn.parameters import count_by_part
    from trident.recipes.loading import load_recipe

    recipe = load_recipe(name, opt.overrides_of(settings))
    parts = count_by_part(recipe.shapes())
    total = sum(parts.values())
    if as_json:
        opt.print_json({"recipe": recipe.name, "total": total, "parts": parts})
        return
    print(f"{recipe.name}: {recipe.summary}\n")
    opt.print_settings(recipe)
    print("\nParameters of the network:\n")
    rows = [[part, f"{count:,}"] for part, count in [*parts.items(), ("total", total)]]
    print("\n".join(opt.aligned(rows, numbers=True)))


@app.command(context_settings=opt.SETTINGS, short_help="Train a model.")
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name, or the path of a TOML file.")] = None,
    settings: opt.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run's files; created if missing.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Start from this run's trained weights, where the networks match."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    device: opt.Device = "auto",
    engine: opt.EngineName = "auto",
    precision: opt.PrecisionName = "auto",
    store_on: opt.StoreOn = "auto",
) -> None:
    """Train a model. Ctrl-C saves and stops; --resume continues with bit-identical results.

    On several GPUs or machines, each step's tasks are shared out, and the result is the same up to rounding:
    torchrun --nproc-per-node 4 -m trident train RECIPE --data STORE --out RUN
    """
    words = [word for word in [recipe, *(settings or [])] if word is not None]
    if resume is not None:
        if out is not None:
            raise TridentError("--resume RUN continues in the run's folder: omit --out")
        if start_from is not None:
            raise TridentError("--resume RUN continues with the run's weights: omit --start-from")
        with opt.on_processes(device, engine, precision) as here:
            finished = _resume(resume, opt.overrides_of(words), data, here, store_on)
        raise typer.Exit(0 if finished else 130)
    if recipe is None or "=" in recipe or recipe.startswith("-"):
        raise TridentError("which recipe? 'trident recipes' lists them, for example: trident train glyphs --out RUN")
    if out is None:
        raise TridentError("no output folder: give --out RUN, a folder for the run's files")
    from trident.recipes.files import read_recipe

    read_recipe(recipe)  # a wrong name is reported before torch is imported
    from trident.recipes.loading import load_recipe

    with opt.on_processes(device, engine, precision) as here:
        from trident.cli.console import say
        from trident.learning.checkpoint import Checkpoint, check_same_inputs, checkpoint_from_first, load_checkpoint
        from trident.learning.run_start import restart_run, stages_of, start_run

        def inputs() -> tuple["Recipe", str, "ImageStore"]:
            loaded = load_recipe(recipe, opt.overrides_of(settings))
            source = opt.data_of(loaded, data, None)
            return loaded, source, opt.open_for(loaded, data, None, store_on)

        loaded, source, store = here.processes.on_each(inputs)
        check_same_inputs(here.processes, loaded, store)

        stages = stages_of(loaded, out) if start_from is None else [(loaded, out)]
        for stage, folder in stages[:-1]:
            if not _train_stage(stage, folder, store, source, here):
                say("give the same command again to go on")
                raise typer.Exit(130)

        def start() -> Checkpoint:
            if here.restarts:
                before = restart_run(loaded, store, out)
                state = f"going on after step {before.step}, the last one saved" if before else "nothing was saved"
                say(f"restart {here.restarts}: {state} in {out}")
                if before:
                    return before
            weights = None if start_from is None else load_checkpoint(start_from)
            return start_run(loaded, store, source, out, here.device, here.engine, here.precision, weights)

        finished = _train(checkpoint_from_first(here.processes, start), store, out, here)
    raise typer.Exit(0 if finished else 130)


def _train_stage(recipe: "Recipe", out: Path, store: "ImageStore", data: str, here: opt.ThisProcess) -> bool:
    """Train a stage before the last one, or go on with it. Returns whether it is finished."""
    from trident.cli.console import say
    from trident.learning.checkpoint import checkpoint_from_first
    from trident.learning.run_lock import held_by_first
    from trident.learning.run_start import restart_run, start_run

    def begin() -> "Checkpoint":
        before = restart_run(recipe, store, out)
        return before or start_run(recipe, store, data, out, here.device, here.engine, here.precision)

    say(f"stage {recipe.name}, in {out}")
    start = checkpoint_from_first(here.processes, begin)
    if start.step == recipe.training.steps and start.validated_step == start.step:
        return True
    with held_by_first(out, here.processes):
        return _train(start, store, out, here)


def _resume(run: Path, overrides: list[str], data: str | None, here: opt.ThisProcess, store_on: str) -> bool:
    from dataclasses import replace

    from trident.learning.checkpoint import LAST, check_same_inputs, checkpoint_from_first, load_checkpoint
    from trident.learning.run_lock import held_by_first
    from trident.learning.run_start import STAGE_FOLDER, check_resumable, check_same_data
    from trident.recipes.loading import with_overrides

    def check_there() -> None:
        if not run.is_dir():
            raise TridentError(f"there is no run at {run}: --resume takes the folder given to --out before")
        if not (run / LAST).is_file() and (run / STAGE_FOLDER).is_dir():
            raise TridentError(f"{run} is still in its first stage: give the command that began it again")

    def last() -> "Checkpoint":
        saved = load_checkpoint(run / LAST)
        recipe = with_overrides(saved.recipe, overrides)
        check_resumable(saved.recipe, recipe)
        return replace(saved, recipe=recipe)

    def inputs() -> "ImageStore":
        store = opt.open_for(checkpoint.recipe, data, checkpoint, store_on)
        check_same_data(checkpoint, store, run)
        return store

    here.processes.from_first(check_there)
    with held_by_first(run, here.processes):  # before the last state is read, so that no other process goes on from it
        checkpoint = checkpoint_from_first(here.processes, last)
        store = here.processes.on_each(inputs)
        check_same_inputs(here.processes, checkpoint.recipe, store)
        return _train(checkpoint, store, run, here)


def _train(start: "Checkpoint", store: "ImageStore", out: Path, here: opt.ThisProcess) -> bool:
    """Returns whether the last step was reached."""
    from trident.cli.console import TrainingProgress, say
    from trident.learning.checkpoint import BEST
    from trident.learning.training import train as run_training
    from trident.measuring.evaluate import validate

    steps = start.recipe.training.steps
    if start.best and not (out / BEST).is_file():
        lost = f"the weights of step {start.best['step']} are lost, and the next validation writes it again"
        say(f"{out / BEST} is missing: {lost}")
    with TrainingProgress(start.step, steps) as progress:
        end = run_training(
            start, store, out, here.device, progress, validate, here.engine, here.precision, here.processes
        )
    if end.step < steps:
        say(f"stopped after step {end.step}; go on with: trident train --resume {out}")
        return False
    best = f"; best validation {end.best['accuracy']:.2f} % at step {end.best['step']}" if end.best else ""
    say(f"trained {end.step} steps{best}. Files in {out}")
    return True
