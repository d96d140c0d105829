"""Trained weights: `trident weights` lists those that come with the package, `export` makes a run fit to be shared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trident.cli.app import app
from trident.cli.options import Data, Device, Json, RunPath, data_of, open_data, sample_of
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.learning.checkpoint import Checkpoint
    from trident.settings import Recipe


@app.command(short_help="List the trained weights that come along.")
def weights(
    name: Annotated[str | None, typer.Argument(help="Show the model card of these weights.")] = None,
    as_json: Json = False,
) -> None:
    """List the trained weights that come with the package, or show a model card.

    Their names can be given wherever a RUN is asked for; nothing is downloaded.
    """
    from trident.weights import model_card, weight_names

    if name is not None and name not in weight_names():
        raise TridentError(f"there are no weights '{name}': there are {', '.join(weight_names())}")
    if as_json:
        print(json.dumps([_described(known) for known in weight_names() if name in (None, known)]))
    elif name is not None:
        print(model_card(name))
    else:
        widest = max(map(len, weight_names()))
        for known in weight_names():
            about = _described(known)
            print(f"{known:{widest}} {about['parameters']:>8,} parameters  {about['summary']}{_caveat(about)}")
        print("'trident weights NAME' shows what they were trained on, what they are good for and how well they do.")


@app.command(short_help="Write a run's weights to a file to share.")
def export(
    run: RunPath,
    to: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    fit: Annotated[
        bool, typer.Option("--fit-temperature", help="Fit the temperatures of 'trident predict' on validation tasks.")
    ] = False,
    data: Data = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="Validation tasks behind --fit-temperature: 200.")] = None,
    device: Device = "auto",
) -> None:
    """Write a run's best weights to one file for others: no optimiser state, no paths of this machine.

    Temperatures that the weights have are kept. They make the probabilities of 'trident predict' honest ones, and
    change no label and no figure of the commands that measure. There are two: for many pictures that are looked at
    together, and for a few or one alone; weights that take inner steps have the first for both.
    """
    from trident.learning.checkpoint import load_checkpoint, save_checkpoint, shareable

    if to.exists():
        raise TridentError(f"{to} exists already: choose another name")
    if not fit and (data is not None or tasks is not None):
        raise TridentError("--data and --tasks go with --fit-temperature: nothing else here needs images")
    checkpoint = load_checkpoint(run)
    if fit:
        checkpoint = _with_temperatures(checkpoint, data, tasks or 200, device)
    save_checkpoint(to, shareable(checkpoint))
    print(
        f"wrote {to}: {checkpoint.described()}, temperature {checkpoint.temperature:.3f}, "
        f"for pictures alone {checkpoint.temperature_alone:.3f}"
    )


def _with_temperatures(checkpoint: "Checkpoint", data: str | None, tasks: int, device: str) -> "Checkpoint":
    from trident.cli.console import counting
    from trident.labelling.labeller import recipe_for
    from trident.measuring.calibration import fit_temperature
    from trident.measuring.evaluate import evaluate_checkpoint

    store = open_data(data_of(checkpoint.recipe, data, checkpoint))
    sample = sample_of("val", tasks, 0, device, None, "auto", "auto")

    def fitted(recipe: "Recipe", what: str) -> float:
        with counting(f"evaluating validation tasks, {what}") as progress:
            result = evaluate_checkpoint(replace(checkpoint, recipe=recipe), store, progress=progress, **sample)
        return round(fit_temperature(result.predictions), 3)

    recipe = checkpoint.recipe
    together = fitted(recipe, "queries together")
    if recipe.model.positional or recipe.adaptation.steps:
        # With the first nobody can label pictures, and the second take fifty times as long to look at fifty alone.
        return replace(checkpoint, temperature=together, temperature_alone=together)
    one = recipe_for(recipe, 1, recipe.episode.n_way)
    alone = fitted(replace(one, protocol=replace(one.protocol, queries_at_once="one")), "queries alone")
    return replace(checkpoint, temperature=together, temperature_alone=alone)


def _caveat(about: dict[str, Any]) -> str:
    """What to know before using weights that read the places in a task; of others, nothing."""
    if not about["positional"]:
        return ""
    return f", trained on {about['query_order'].replace('_', '-')} queries; for measuring, labels no pictures"


def _described(name: str) -> dict[str, Any]:
    from trident.learning.checkpoint import load_checkpoint
    from trident.weights import weights_file

    checkpoint: Checkpoint = load_checkpoint(weights_file(name))
    return {
        "name": name,
        "summary": checkpoint.recipe.summary,
        "recipe": checkpoint.recipe.name,
        "query_order": checkpoint.recipe.protocol.query_order,
        "positional": checkpoint.recipe.model.positional,
        "trained_on": checkpoint.provenance.get("dataset"),
        "steps": checkpoint.step,
        "parameters": sum(value.numel() for value in checkpoint.parameters.values()),
        "validation": checkpoint.best,
        "temperature": checkpoint.temperature,
        "temperature_alone": checkpoint.temperature_alone,
    }
