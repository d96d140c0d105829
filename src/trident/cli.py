"""The `trident` command. Heavy imports stay inside the commands, so that help is there at once."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.checkpoint import Checkpoint
    from trident.data.store import ImageStore
    from trident.settings import Recipe

SETTINGS = {"ignore_unknown_options": True}  # --training.steps=5 is taken as a setting, and checked as one
DatasetName = Literal["mini-imagenet", "tiered-imagenet", "cub", "omniglot", "cifar-fs", "folder"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Few-shot image classification with TRIDENT.\n\n"
    "Try it:  trident train glyphs --out runs/first   then   trident evaluate runs/first",
)
data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Turn datasets into packed stores, look into them."
)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override; 'trident recipes NAME' lists them."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a weights file.")]


def main() -> None:
    """Run the command; a mistake of the user's is one line on standard error and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TridentError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("trident: stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        # Told apart by name and shape, since where these classes live differs between versions and torch loads late.
        if type(error).__name__ == "OutOfMemoryError":
            _fail("out of memory: compute fewer tasks at once, with training.tasks_per_chunk or --tasks-per-chunk")
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(0)
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def _fail(message: str) -> None:
    print(f"trident: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        import trident

        print(trident.__version__)
        raise typer.Exit


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="A recipe: show all its settings.")] = None) -> None:
    """List the recipes, or show every setting of one with its meaning."""
    from trident.recipes import load_recipe, recipe_names, recipe_values, setting_help

    if name is None:
        for known in recipe_names():
            print(f"{known:12} {load_recipe(known).summary}")
        return
    recipe = load_recipe(name)
    values = recipe_values(recipe)
    print(f"{recipe.name}: {recipe.summary}\n")
    for key, help_text in setting_help().items():
        section, setting = key.split(".")
        print(f"{key + '=' + _shown(values[section][setting]):44} {help_text}")


@app.command(context_settings=SETTINGS)
def params(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a TOML file.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Count the parameters of a recipe's network, part by part."""
    from trident.model import Trident
    from trident.recipes import load_recipe

    loaded = load_recipe(recipe, _overrides(settings))
    parts: dict[str, int] = {}
    for key, value in Trident(loaded.model, loaded.episode).initial(0).items():
        part = ".".join(key.split(".")[:2]) if key.startswith(("label.", "semantic.")) else key.split(".")[0]
        parts[part] = parts.get(part, 0) + value.numel()
    total = sum(parts.values())
    if as_json:
        print(json.dumps({"recipe": loaded.name, "total": total, "parts": parts}))
        return
    for part, count in [*parts.items(), ("total", total)]:
        print(f"{part:20} {count:>9,}")


@app.command(context_settings=SETTINGS)
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name, or the path of a TOML file.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run's files; made if need be.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run from its last checkpoint.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A store made by 'trident data prepare'. The glyphs need none.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Meta-train a model. Ctrl-C saves and stops; --resume goes on where it stopped, bit for bit."""
    words = [word for word in [recipe, *(settings or [])] if word is not None]
    if resume is not None:
        if out is not None:
            raise TridentError("--resume RUN goes on in the run's own folder: leave --out away")
        _resume(resume, _overrides(words), data, device)
        return
    if recipe is None or "=" in recipe or recipe.startswith("-"):
        raise TridentError("which recipe? 'trident recipes' lists them, for example: trident train glyphs --out RUN")
    if out is None:
        raise TridentError("where to? Give --out RUN, a folder for the run's files")
    from trident.recipes import load_recipe

    loaded = load_recipe(recipe, _overrides(settings))
    source = _data_of(loaded, data, None)
    store, device = _open(source), _device(device)
    from trident.train import start_run

    _train(start_run(loaded, store, source, out, device), store, out, device)


def _resume(run: Path, overrides: list[str], data: str | None, device: str) -> None:
    from dataclasses import replace

    from trident.checkpoint import LAST, load_checkpoint
    from trident.recipes import with_overrides
    from trident.train import check_resumable, resume_run

    if not run.is_dir():
        raise TridentError(f"there is no run at {run}: --resume takes the folder given to --out before")
    checkpoint = load_checkpoint(run / LAST)
    recipe = with_overrides(checkpoint.recipe, overrides)
    check_resumable(checkpoint.recipe, recipe)
    checkpoint = replace(checkpoint, recipe=recipe)
    store = _open(_data_of(recipe, data, checkpoint))
    _train(resume_run(checkpoint, store, run), store, run, _device(device))


def _train(start: "Checkpoint", store: "ImageStore", out: Path, device: str) -> None:
    from trident.console import TrainingProgress, stderr
    from trident.train import train as run_training

    steps = start.recipe.training.steps
    with TrainingProgress(start.step, steps) as progress:
        end = run_training(start, store, out, device, progress)
    if end.step < steps:
        stderr.print(f"stopped after step {end.step}; go on with: trident train --resume {out}", soft_wrap=True)
        raise typer.Exit(130)
    best = f"; best validation {end.best['accuracy']:.2f} % at step {end.best['step']}" if end.best else ""
    stderr.print(f"trained {end.step} steps{best}. Files in {out}", soft_wrap=True)


@app.command()
def evaluate(
    run: RunPath,
    data: Annotated[str | None, typer.Option(help="A store; by default the one the run was trained on.")] = None,
    split: Annotated[Literal["train", "val", "test"], typer.Option(help="Classes to draw tasks from.")] = "test",
    tasks: Annotated[int, typer.Option(min=2, help="Number of tasks.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Decides the tasks and the noise.")] = 0,
    n_way: Annotated[int | None, typer.Option(min=1)] = None,
    n_shot: Annotated[int | None, typer.Option(min=1)] = None,
    n_query: Annotated[int | None, typer.Option(min=1, help="Queries per class.")] = None,
    query_order: Annotated[Literal["shuffled", "class_sorted"] | None, typer.Option()] = None,
    balance: Annotated[Literal["balanced", "dirichlet"] | None, typer.Option()] = None,
    dirichlet_alpha: Annotated[float | None, typer.Option()] = None,
    batch_norm: Annotated[Literal["transductive", "support", "running"] | None, typer.Option()] = None,
    latents: Annotated[Literal["sample", "mean", "average"] | None, typer.Option()] = None,
    latent_samples: Annotated[int | None, typer.Option(min=1, help="Samples behind --latents average.")] = None,
    inner_steps: Annotated[int | None, typer.Option(min=0, help="Inner steps, if other than in training.")] = None,
    tasks_per_chunk: Annotated[int | None, typer.Option(min=1, help="Tasks at once; fewer need less memory.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure accuracy on tasks from classes never seen in training. What is not given is as in training."""
    from trident.checkpoint import load_checkpoint
    from trident.console import counting
    from trident.evaluate import TASKS_PER_CHUNK, check_episode
    from trident.evaluate import evaluate as measure
    from trident.recipes import with_overrides

    given = {
        "episode.n_way": n_way,
        "episode.n_shot": n_shot,
        "episode.n_query": n_query,
        "protocol.query_order": query_order,
        "protocol.balance": balance,
        "protocol.dirichlet_alpha": dirichlet_alpha,
        "protocol.batch_norm": batch_norm,
        "protocol.latents": latents,
        "protocol.latent_samples": latent_samples,
        "adaptation.steps": inner_steps,
    }
    checkpoint = load_checkpoint(run)
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    recipe = with_overrides(checkpoint.recipe, overrides)
    check_episode(checkpoint, recipe.episode)
    store, device = _open(_data_of(recipe, data, checkpoint)), _device(device)
    with counting("evaluating tasks") as progress:
        result = measure(
            recipe,
            checkpoint.parameters,
            checkpoint.running,
            store,
            split=split,
            tasks=tasks,
            seed=seed,
            device=device,
            tasks_per_chunk=tasks_per_chunk or TASKS_PER_CHUNK,
            progress=progress,
        )
    if as_json:
        weights = {"file": str(checkpoint.path), "recipe": recipe.name, "step": checkpoint.step}
        print(json.dumps({**result.to_json(), "weights": weights}, allow_nan=False))
    else:
        print(f"accuracy {result.accuracy:.2f} ± {result.ci95:.2f} %")
        print(f"({result.describe_protocol()}; {recipe.name} after {checkpoint.step} steps)")


@data_app.command()
def prepare(
    name: Annotated[DatasetName, typer.Argument(help="Which dataset it is.")],
    source: Annotated[
        Path, typer.Option("--from", help="Where the dataset's files are; docs/data.md says in which form.")
    ],
    target: Annotated[Path, typer.Option("--to", help="The store file to write.")],
    image_size: Annotated[
        int | None, typer.Option(min=16, help="Pixels; by default 84 (Omniglot 28, CIFAR-FS 32).")
    ] = None,
    split_file: Annotated[Path | None, typer.Option(help="JSON with the classes of train, val and test.")] = None,
) -> None:
    """Decode a dataset once, check it, and write a packed store that opens at once."""
    from trident.console import counting, stderr
    from trident.data.prepare import prepare as write

    with counting("images") as progress:
        store = write(name, source, target, image_size=image_size, split_file=split_file, progress=progress)
    stderr.print(f"wrote {target}: {len(store.images)} images of {len(store.classes)} classes", soft_wrap=True)


@data_app.command()
def show(
    store: Annotated[str, typer.Argument(help="A store file, or 'glyphs'.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every pixel and check the fingerprint.")] = False,
    as_json: Json = False,
) -> None:
    """Print what a store holds."""
    from trident.data.describe import describe, verify_fingerprint

    opened = _open(store)
    about = describe(opened)
    if verify and not verify_fingerprint(opened):
        raise TridentError(f"{store} has changed since it was written: its pixels do not fit its fingerprint")
    if as_json:
        print(json.dumps(about))
        return
    for key, value in about.items():
        if key != "splits":
            print(f"{key:14} {value}")
    for split, counts in about["splits"].items():
        print(f"{split:14} {', '.join(f'{count} {what}' for what, count in counts.items())}")


def _overrides(words: list[str] | None) -> list[str]:
    """`key=value`, `--key=value` and `--key value` all become `key=value`."""
    found: list[str] = []
    waiting: str | None = None
    for word in words or []:
        if waiting is not None:
            found.append(f"{waiting}={word}")
            waiting = None
        elif word.startswith("--") and "=" not in word:
            waiting = word
        else:
            found.append(word)
    return [*found, f"{waiting}="] if waiting is not None else found


def _data_of(recipe: "Recipe", given: str | None, checkpoint: "Checkpoint | None") -> str:
    if given is not None:
        return given if given == "glyphs" else str(Path(given).resolve())
    if checkpoint is not None and checkpoint.provenance["data"] is not None:
        return str(checkpoint.provenance["data"])
    if recipe.dataset == "glyphs":
        return "glyphs"
    raise TridentError(
        f"recipe {recipe.name} needs {recipe.dataset}: give --data STORE, made by 'trident data prepare'"
    )


def _open(source: str) -> "ImageStore":
    if source == "glyphs":
        from trident.data.glyphs import open_glyphs

        return open_glyphs()
    from trident.data.store import open_store

    return open_store(Path(source))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise TridentError(f"'{name}' is not a device: it must be auto, cpu, cuda or cuda:N")
    if name.startswith("cuda") and int(name[5:] or 0) >= torch.cuda.device_count():
        raise TridentError(f"there is no {name} here: leave --device away, or give --device cpu")
    return name


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
