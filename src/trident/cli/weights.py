"""`trident weights` lists the included trained weights, `trident export` writes a run's, `trident backbones` lists what
turns pictures into features."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError, did_you_mean
from trident.learning.weights_header import check_run, read_header
from trident.methods.registry import about, method_paths
from trident.weights import weight_names, weights_file


@app.command(short_help="List the included trained weights.")
def weights(
    name: Annotated[str | None, typer.Argument(help="Show the model card of these weights.")] = None,
    as_json: opt.Json = False,
) -> None:
    """List the included trained weights, or show a model card.

    Use their names wherever a RUN is expected. Nothing is downloaded.
    """
    if name is not None and name not in weight_names():
        raise TridentError(f"there are no weights '{name}'{did_you_mean(name, weight_names())}")
    if as_json:
        opt.print_json([_described(known) for known in weight_names() if name in (None, known)])
    elif name is not None:
        from trident.leaderboard.card import card_of

        print(card_of(name))
    else:
        widest = max(map(len, weight_names()))
        for known in weight_names():
            values = _described(known)
            about_known = f"{known:{widest}} {values['parameters']:>8,} parameters  {values['summary']}"
            if values["positional"]:  # they depend on positions in a task
                order = values["query_order"].replace("_", "-")
                about_known += f", trained on {order} queries; for measuring only, labels no pictures"
            print(about_known)
        print("'trident weights NAME' shows their training data, use and accuracy.")


@app.command(short_help="Write a run's weights to a file to share.")
def export(
    run: opt.RunPath,
    to: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    fit: Annotated[
        bool, typer.Option("--fit-temperature", help="Fit the temperatures of 'trident predict' on validation tasks.")
    ] = False,
    half: Annotated[bool, typer.Option("--half", help="Write half-precision numbers: half the size.")] = False,
    data: opt.Data = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="Tasks for --fit-temperature; default: 200.")] = None,
    device: opt.Device = "auto",
) -> None:
    """Write a run's best weights to a file for sharing, without optimiser state and local paths.

    The temperatures of the weights are kept. They calibrate the probabilities of 'trident predict'; they change no
    label and no measurement. There are three: for many pictures classified together, for a few, and for single
    pictures. Weights with inner steps use the first for all.
    """
    from trident.files import check_new
    from trident.learning.checkpoint import load_checkpoint, save_checkpoint, shareable

    check_run(run)
    check_new(to)
    if not fit and (data is not None or tasks is not None):
        raise TridentError("--data and --tasks need --fit-temperature")
    checkpoint = load_checkpoint(run)
    if fit:
        from trident.cli.console import Counter
        from trident.labelling.labeller import fit_temperatures
        from trident.measuring.subject import Sample

        store = opt.open_for(checkpoint.recipe, data, checkpoint)
        sample = Sample(split="val", tasks=tasks or 200, seed=0, device=opt.device_of(device))
        with Counter("evaluating validation tasks") as progress:
            checkpoint = replace(checkpoint, temperatures=fit_temperatures(checkpoint, store, progress, **sample))
    save_checkpoint(to, shareable(checkpoint, half))
    print(
        f"wrote {to}: {checkpoint.describe()}, temperatures "
        + ", ".join(f"{value:.3f} ({name})" for name, value in checkpoint.temperatures._asdict().items())
    )


def _described(name: str) -> dict[str, Any]:
    """What the header of the file says."""
    header, n_parameters = read_header(weights_file(name))
    recipe, method = header["recipe"], header["recipe"]["method"]["name"]
    return {
        "name": name,
        "summary": recipe["summary"],
        "recipe": recipe["name"],
        "query_order": recipe["protocol"]["query_order"],
        "method": method_paths()[method].partition(":")[2],
        "positional": about(method).positional and recipe["method"].get("attfex") == "positional",
        "trained_on": header["provenance"].get("dataset"),
        "steps": header["step"],
        "parameters": n_parameters,
        "validation": header["best"],
        "temperatures": header["temperatures"],
    }


HEADINGS = ("backbone", "pictures", "features", "licence", "trained on", "installed")


@app.command(short_help="List the networks that make features, or examine one.")
def backbones(
    name: Annotated[
        str | None, typer.Argument(help="Load this one, for example onnx:model.onnx, and print what is known about it.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List the networks that turn pictures into features, or load one and print what is known about it.

    All but conv4 are frozen: they are used as they are. Those that begin with 'weights:' were trained here; the name
    may also be a run's folder or a weights file. Nothing is downloaded.
    """
    if name is None:
        _print_list(as_json)
        return
    from trident.backbones.pretrained import examined

    about = examined(name)
    if as_json:
        opt.print_json(about)
        return
    shown = about | {"image_size": f"{about['image_size']}x{about['image_size']} pixels"}
    rows = [(key.replace("_", " "), _text(value)) for key, value in shown.items() if value is not None]
    print("\n".join(opt.aligned(rows)))


def _print_list(as_json: bool) -> None:
    from trident.backbones.pretrained import listed

    known = listed()
    if as_json:
        opt.print_json(known)
        return
    print("\n".join(opt.aligned([HEADINGS, *map(_row, known)])))
    print("'trident backbones NAME' loads one and prints what is known about it.")
    if missing := {about["install"] for about in known if not about["installed"]}:
        print("To install:", *sorted(missing), sep="\n  ")


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    size = about["image_size"]
    facts = (size and f"{size}x{size}", about["features"], about["licence"], about["trained_on"])
    return about["name"], *(str(fact or "depends") for fact in facts), "yes" if about["installed"] else "no"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
