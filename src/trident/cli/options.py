"""Options that the commands share, how they become settings, data, devices and processes, and tables in plain text."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from trident.distributed.torchrun import launched
from trident.errors import TridentError, one_line

if TYPE_CHECKING:
    from trident.data.store import ImageStore
    from trident.distributed.processes import Processes
    from trident.learning.checkpoint import Checkpoint
    from trident.recipes.recipe import Recipe

SETTINGS = {"ignore_unknown_options": True}  # --training.steps=5 is read as a setting

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if available.")]
EngineName = Annotated[
    Literal["auto", "plain", "fused"],
    typer.Option("--engine", help="Code to compute with; auto: fused on a supported GPU, else plain."),
]
PrecisionName = Annotated[
    Literal["auto", "fp32", "tf32", "fp16", "bf16"],
    typer.Option("--precision", help="Number format; auto: fp16 with the fused engine, else fp32."),
]
StoreOn = Annotated[
    Literal["auto", "device", "host"],
    typer.Option(
        "--store-on",
        help="Where the store's images are kept: on the GPU, or in host memory, from which each batch is copied ahead; "
        "auto: on the GPU if they fit.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override; 'trident recipes NAME' lists them."),
]
RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, a weights file, a name that 'trident weights' lists, or a recipe that needs no training.",
    ),
]
Data = Annotated[str | None, typer.Option(help="A store; by default the one the run was trained on.")]
Split = Annotated[
    Literal["train", "val", "test"],
    typer.Option(help="Classes to draw tasks from. Choose on val; use test only for the final number."),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed of the tasks and the noise.")]
TemperatureData = Annotated[
    str | None, typer.Option(help="Store to fit the temperature on; default: the training data.")
]
Chunk = Annotated[int | None, typer.Option(min=1, help="Tasks computed at once on each core; fewer need less memory.")]


Support = Annotated[
    Path | None, typer.Option(help="Labelled pictures: a folder with one folder for each class.", show_default=False)
]
Query = Annotated[
    Path,
    typer.Option(
        help="The pictures to label: a folder, including its subfolders; a text file with one path on each line; or a "
        "folder of tar archives (WebDataset) or of Parquet files."
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="auto|ADDRESS",
        help="Compute features on a Ray cluster: HOST:PORT of its head node; auto: the one that runs here, or else "
        "a new one of this machine alone.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Label with these weights of conv4: a name from 'trident weights', a run or a file. auto, with --backbone "
        "conv4: by the number of labelled pictures."
    ),
]
Backbone = Annotated[
    str,
    typer.Option(
        help="Network that looks at the pictures; 'trident backbones' lists them. auto: efficientnet-lite0 if it is "
        "installed, otherwise weights:mini-ensemble."
    ),
]
Model = Annotated[
    Path | None, typer.Option(help="A classifier that 'trident fit' wrote, instead of --support.", show_default=False)
]
Corrections = Annotated[
    Path | None,
    typer.Option(
        help="A table of 'trident predict' in which you wrote the right class, or the words 'none of these', into the "
        "column 'correction'. A corrected picture becomes an example of its class; one of 'none of these' of no class.",
        show_default=False,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Do not keep features on disk; a stopped command then starts anew.")
]


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ", numbers: bool = False) -> list[str]:
    """Rows with their columns aligned to the left; with `numbers`, all but the first column to the right."""
    rows = [[one_line(entry) for entry in row] for row in rows]
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([entry.rjust(width) if numbers and place else entry.ljust(width) for entry in column])
    return [gap.join(row).rstrip() for row in zip(*columns, strict=True)]


def print_json(values: Any) -> None:
    """Numbers that are not finite are an error: they are no JSON."""
    print(json.dumps(values, allow_nan=False))


def overrides_of(words: list[str] | None) -> list[str]:
    """`key=value`, `--key=value` and `--key value` all become `key=value`."""
    rest = iter(words or [])
    return [f"{word}={next(rest, '')}" if word.startswith("--") and "=" not in word else word for word in rest]


def load_for_measuring(run: Path, settings: list[str] | None) -> "Checkpoint":
    """A run's weights, with overrides of settings that may change after training."""
    from trident.learning.checkpoint import load_checkpoint
    from trident.measuring.inputs import with_settings

    return with_settings(load_checkpoint(run), overrides_of(settings))


def data_of(recipe: "Recipe", given: str | None, checkpoint: "Checkpoint | None") -> str:
    if given is not None:
        return given if given == "glyphs" else str(Path(given).resolve())
    if checkpoint is not None and checkpoint.provenance["data"] is not None:
        return str(checkpoint.provenance["data"])
    if recipe.dataset == "glyphs":
        return "glyphs"
    raise TridentError(
        f"recipe {recipe.name} needs {recipe.dataset}: give --data STORE, made by 'trident data prepare'"
    )


def open_fitting_data(given: str | None, checkpoint: "Checkpoint", measured: "ImageStore") -> "ImageStore":
    """The store to fit a temperature on: the training data, unless another store is given.

    Exported weights do not contain its path. The measured store is used if it holds the same data, and for methods
    that are not trained: the temperature is fitted on its validation classes.
    """
    if given is not None:
        return open_for(checkpoint.recipe, given, checkpoint)
    provenance = checkpoint.provenance
    untrained = checkpoint.recipe.method.about.trained_on == "nothing"
    if untrained or measured.fingerprint == provenance["fingerprint"]:
        return measured
    try:
        return open_for(checkpoint.recipe, None, checkpoint)
    except TridentError as error:
        reason = provenance["dataset"] if provenance["data"] is None else f"but {error}"
        raise TridentError(
            f"the temperature is fitted on the data trained on, {reason}; name a store with --temperature-data"
        ) from error


def open_for(
    recipe: "Recipe",
    given: str | None,
    checkpoint: "Checkpoint | None" = None,
    store_on: str = "auto",
    split: str | None = None,
) -> "ImageStore":
    """The store for a recipe or for weights; `split`: the only one that is measured."""
    from trident.cli.console import Counter, say
    from trident.measuring.inputs import as_recipe_takes_it

    store = open_data(data_of(recipe, given, checkpoint), store_on)
    return as_recipe_takes_it(recipe, store, split, say, Counter)


def open_data(source: str, store_on: str = "auto") -> "ImageStore":
    if source == "glyphs":
        from trident.data.glyphs import open_glyphs

        return replace(open_glyphs(), keep_on=store_on)
    from trident.data.store import open_store

    return replace(open_store(Path(source)), keep_on=store_on)


def device_of(name: str, local_rank: int | None = None) -> str:
    from trident.engines.execution import usable_device

    return usable_device(name, local_rank)


def print_settings(recipe: "Recipe", section: str | None = None) -> None:
    """Every setting of a recipe, or of one section of it, with its value, its meaning and its choices."""
    from trident.recipes.loading import formatted, setting_bounds, setting_help, setting_of, setting_types

    bounds = setting_bounds(recipe)
    types, meanings = setting_types(recipe), setting_help(recipe)
    chosen = [key for key in meanings if section in (None, key.split(".")[0])]
    rows = {key: f"{key}={formatted(setting_of(recipe, key))}" for key in chosen}
    width = max(map(len, rows.values()), default=0)
    for key, row in rows.items():
        choices = f" [{'|'.join(get_args(types[key]))}]" if get_origin(types[key]) is Literal else ""
        largest = f" [at most {bounds[key]:.19g}]" if types[key] in (int, int | None) else ""
        print(f"{row:{width}} {meanings[key]}{choices}{largest}")


class ThisProcess(NamedTuple):
    """How this process computes, and its place among those that torchrun started."""

    processes: "Processes"  # all of them, and which one this is
    device: str
    engine: str
    precision: str
    restarts: int  # how often torchrun has started the processes again


@contextmanager
def stoppable(resumable: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Ctrl-C prints a line, which says whether the same command goes on where this one stopped."""
    try:
        yield
    except KeyboardInterrupt:
        goes_on = "; the same command goes on where it stopped" if resumable() else ""
        print(f"trident: stopped{goes_on}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def on_processes(device: str, engine: str = "auto", precision: str = "auto") -> Iterator[ThisProcess]:
    """Connects this process with the others that torchrun started, if it did. The first alone prints progress."""
    from trident.cli.console import stderr
    from trident.distributed.processes import ALONE, connected

    place = launched()
    if place is None:
        yield ThisProcess(ALONE, device_of(device), engine, precision, restarts=0)
        return
    import torch

    # Processes that share one GPU, which has to be named, must do without NCCL.
    nccl = device in ("auto", "cuda") and torch.cuda.is_available()
    stderr.quiet = place.rank > 0
    with connected(place, nccl) as processes:
        own = processes.on_each(lambda: device_of(device, place.local_rank))
        if own.startswith("cuda"):
            torch.cuda.set_device(own)
        yield ThisProcess(processes, own, engine, precision, place.restarts)
