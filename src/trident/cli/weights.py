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

    Temperatures that the weights have are kept. They calibrate the probabilities of 'trident predict', and change no
    label and no figure of the commands that measure. There are three: for many pictures that are classified together,
    for a few, and for one alone. Weights that take inner steps use the first for all.
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
        f"wrote {to}: {checkpoint.described()}, temperatures "
        + ", ".join(f"{value:.3f} ({name})" for name, value in checkpoint.temperatures._asdict().items())
    )


def _with_temperatures(checkpoint: "Checkpoint", data: str | None, tasks: int, device: str) -> "Checkpoint":
    from trident.cli.console import counting
    from trident.labelling.temperatures import fit_temperatures

    store = open_data(data_of(checkpoint.recipe, data, checkpoint))
    sample = sample_of("val", tasks, 0, device, None)
    with counting("evaluating validation tasks") as progress:
        temperatures = fit_temperatures(checkpoint, store, progress, **sample)
    return replace(checkpoint, temperatures=temperatures)


def _caveat(about: dict[str, Any]) -> str:
    """What to know before using weights that read the places in a task; of others, nothing."""
    if not about["positional"]:
        return ""
    return f", trained on {about['query_order'].replace('_', '-')} queries; for measuring, labels no pictures"


def _described(name: str) -> dict[str, Any]:
    from trident.learning.checkpoint import load_checkpoint

    checkpoint: Checkpoint = load_checkpoint(name)
    return {
        "name": name,
        "summary": checkpoint.recipe.summary,
        "recipe": checkpoint.recipe.name,
        "query_order": checkpoint.recipe.protocol.query_order,
        "method": type(checkpoint.recipe.method).__name__,
        "positional": checkpoint.recipe.method.positional,
        "trained_on": checkpoint.provenance.get("dataset"),
        "steps": checkpoint.step,
        "parameters": sum(value.numel() for value in checkpoint.parameters.values()),
        "validation": checkpoint.best,
        "temperatures": checkpoint.temperatures._asdict(),
    }
