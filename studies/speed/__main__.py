"""Speed: `python -m studies.speed train`, `python -m studies.speed evaluate` and `python -m studies.speed predict`."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trident.cli.app import main
from trident.cli.options import (
    SETTINGS,
    Device,
    EngineName,
    Json,
    PrecisionName,
    Settings,
    StoreOn,
    aligned,
    data_of,
    device_of,
    open_data,
    overrides_of,
)
from trident.errors import TridentError

if TYPE_CHECKING:
    from studies.speed.benchmarks import Benchmark
    from studies.speed.timing import Measurement
    from trident.recipes.recipe import Recipe

study = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure speed: training and evaluation, compared with a plain loop over tasks, and labelling.",
)

NShot = Annotated[
    int | None,
    typer.Option(min=1, help="1 or 5: recipe mini-5w1s (the default) or mini-5w5s. With --recipe, its shots."),
]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="Another recipe, by name or by path of a TOML file.")]
BenchTasks = Annotated[int | None, typer.Option("--tasks", min=1, help="Tasks in one round.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Timed rounds after the warm-up; the median is reported.")]
BenchData = Annotated[
    str | None, typer.Option("--data", help="A store, or 'glyphs'; by default made-up images of the right size.")
]
NoYardstick = Annotated[
    bool, typer.Option("--no-yardstick", help="Skip the plain loop: faster, but no ratio and no difference.")
]
PlainLayout = Annotated[
    Literal["nchw", "channels-last"],
    typer.Option("--plain-layout", help="Memory layout of the plain loop's tensors; torch's default is nchw."),
]
Images = Annotated[
    int | None,
    typer.Option(
        "--images",
        min=1,
        help="Draw new tasks in each round, as training does, from a made-up store of this many images; drawing is "
        "timed too. Implies --no-yardstick.",
    ),
]
# Default (tasks, repeats) on a GPU and on a CPU: a few minutes at most.
_DEFAULTS = {"train": {"cuda": (20, 5), "cpu": (2, 3)}, "evaluate": {"cuda": (600, 3), "cpu": (1, 7)}}
_DIFFERENCE = {
    "train": "relative difference of the meta-gradients",
    "evaluate": "largest difference of a probability",
}


@study.command(context_settings=SETTINGS, short_help="Time a meta-iteration.")
def train(
    settings: Settings = None,
    n_shot: NShot = None,
    recipe: RecipeName = None,
    tasks: BenchTasks = None,
    repeats: Repeats = None,
    data: BenchData = None,
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
    no_yardstick: NoYardstick = False,
    plain_layout: PlainLayout = "nchw",
    device: Device = "auto",
    store_on: StoreOn = "auto",
    images: Images = None,
    as_json: Json = False,
) -> None:
    """Time a meta-iteration: the meta-gradient of some tasks, through all their inner steps.

    \b
    python -m studies.speed train                       20 tasks on a GPU; 2 on a CPU, a few minutes
    python -m studies.speed train --n-shot 5
    python -m studies.speed train --recipe glyphs method.inner_steps=3
    python -m studies.speed train --images 950000 --store-on host     a store of 20 GB that stays in host memory

    The yardstick is a plain loop that computes the same gradient: one task at a time, with torch's layers and autograd
    through the unrolled steps, in float32 (on a GPU with TF32 convolutions, torch's default). The ratio is its time
    divided by ours. The difference is the relative difference of the two meta-gradients; for it, the loop runs in full
    float32. The warm-up is the time before the first timed round, including compilation. The weights are untrained;
    this does not affect the time.
    """
    _run(
        "train",
        settings,
        n_shot,
        recipe,
        tasks,
        repeats,
        data,
        engine,
        precision,
        no_yardstick,
        plain_layout,
        device,
        as_json,
        store_on,
        images,
    )


@study.command(context_settings=SETTINGS, short_help="Time an evaluation.")
def evaluate(
    settings: Settings = None,
    n_shot: NShot = None,
    recipe: RecipeName = None,
    tasks: BenchTasks = None,
    repeats: Repeats = None,
    data: BenchData = None,
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
    no_yardstick: NoYardstick = False,
    plain_layout: PlainLayout = "nchw",
    device: Device = "auto",
    store_on: StoreOn = "auto",
    as_json: Json = False,
) -> None:
    """Time an evaluation: adapting to some tasks, then predicting their queries.

    \b
    python -m studies.speed evaluate                    600 tasks on a GPU; one task, repeated, on a CPU
    python -m studies.speed evaluate --n-shot 5 --tasks 4
    python -m studies.speed evaluate --recipe glyphs --data glyphs --tasks 600

    The yardstick is a plain loop that does the same: one task at a time, with torch's layers, in float32. If a round of
    it would take more than a minute, it is timed on fewer tasks and scaled; the output says on how many. The ratio is
    its time divided by ours. The difference is the largest difference of any probability.
    """
    _run(
        "evaluate",
        settings,
        n_shot,
        recipe,
        tasks,
        repeats,
        data,
        engine,
        precision,
        no_yardstick,
        plain_layout,
        device,
        as_json,
        store_on,
    )


@study.command(short_help="Time the labelling of a pile.")
def predict(
    n_way: Annotated[int, typer.Option(min=2, help="Classes.")] = 5,
    n_shot: Annotated[int, typer.Option(min=1, help="Labelled pictures of each class.")] = 5,
    pictures: Annotated[int, typer.Option(min=1, help="Number of pictures to label.")] = 100,
    size: Annotated[int, typer.Option(min=8, help="Height and width of the JPEG files.")] = 320,
    backbone: Annotated[str, typer.Option(help="As for 'trident predict'.")] = "auto",
    weights: Annotated[str, typer.Option(help="As for 'trident predict'.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 3,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time 'trident predict' on made-up pictures: seconds from the command to its CSV file, and peak memory.

    \b
    python -m studies.speed predict                     5 classes, 5 labelled pictures of each, a pile of 100
    python -m studies.speed predict --pictures 5000 --repeats 1

    Each run is a new process, so loading is included.
    """
    from studies.speed.predicting import bench_predict
    from trident.cli.console import Counter

    with Counter("labelling piles") as progress:
        result = bench_predict(n_way, n_shot, pictures, size, backbone, weights, device_of(device), repeats, progress)
    about = result.to_json()
    if as_json:
        print(json.dumps(about, allow_nan=False))
        return
    each = ", ".join(f"{seconds:.2f}" for seconds in result.rounds)
    network = result.backbone + (f", weights {weights}" if result.backbone == "conv4" else "")
    cached = about["seconds_with_cached_features"]
    again = "" if cached is None else f"\n{cached:.2f} s again, with cached features"
    print(
        f"predict: {n_way} classes, {n_shot} labelled pictures of each, a pile of {pictures}, {size}x{size} "
        f"JPEG, {network}\non {about['device']}; torch {about['torch']}; {about['date'][:10]}\n"
        f"{about['seconds']:.2f} s from command to CSV, median of {repeats} ({each}); "
        f"peak memory {result.peak:.2f} GiB{again}"
    )


def _run(
    name: Literal["train", "evaluate"],
    settings: list[str] | None,
    n_shot: int | None,
    recipe_name: str | None,
    tasks: int | None,
    repeats: int | None,
    data: str | None,
    engine: str,
    precision: str,
    no_yardstick: bool,
    plain_layout: str,
    device: str,
    as_json: bool,
    store_on: str,
    images: int | None = None,
) -> None:
    if images is not None and data is not None:
        raise TridentError("--images and --data exclude each other: the number is that of made-up images")
    recipe = _recipe(recipe_name, n_shot, overrides_of(settings))
    store = open_data(data_of(recipe, data, None), store_on) if data is not None else None
    device = device_of(device)
    from studies.speed.benchmarks import bench_evaluate, bench_train
    from studies.speed.made_up import large_made_up_store, made_up_store
    from trident.cli.console import Counter
    from trident.engines.execution import execution_for

    if store is None:
        made_up = made_up_store(recipe) if images is None else large_made_up_store(recipe, images)
        store = replace(made_up, keep_on=store_on)
    default_tasks, default_repeats = _DEFAULTS[name][device.split(":")[0]]
    with Counter("warming up") as progress:
        result = (bench_train if name == "train" else bench_evaluate)(
            recipe,
            execution_for(device, engine, precision, recipe),
            store,
            tasks=tasks or default_tasks,
            repeats=repeats or default_repeats,
            yardstick=not no_yardstick and images is None,
            new_tasks=images is not None,
            plain_layout=plain_layout,
            progress=lambda who, done, total: progress(done, total, f"{who}, rounds"),
        )
    print(json.dumps(result.to_json(), allow_nan=False) if as_json else _shown(result))


def _recipe(name: str | None, n_shot: int | None, overrides: list[str]) -> "Recipe":
    from trident.recipes.loading import load_recipe

    if name is not None:
        return load_recipe(name, [*([f"episode.n_shot={n_shot}"] if n_shot else []), *overrides])
    if n_shot not in (None, 1, 5):
        raise TridentError(f"--n-shot is {n_shot}: the paper's recipes have 1 or 5; with --recipe it can be any number")
    return load_recipe(f"mini-5w{n_shot or 1}s", overrides)


def _shown(result: "Benchmark") -> str:
    recipe, about, plain = result.recipe, result.to_json(), result.plain
    size, tasks = about["image_size"], result.tasks
    how = recipe.method.describe()
    rows = [
        ("", "seconds", "fastest", "slowest", "ms/task", "tasks/s", "peak GiB", "warm-up s"),
        (*_row("trident", result.ours, tasks, tasks), f"{result.ours.warm_up:.1f}"),
    ]
    reserved = about["reserved_memory_gib"]
    below = [f"(peak memory: {about['peak_memory_of']}{'' if reserved is None else f'; {reserved:.2f} GiB reserved'})"]
    if plain is not None:
        rows.append((*_row("plain loop", plain.measurement, plain.tasks, tasks), ""))
        below.insert(
            0, f"ratio {result.ratio:.2f} (plain loop / trident); {_DIFFERENCE[result.name]} {plain.difference:.1e}"
        )
        if plain.tasks < tasks:
            below.append(f"(plain loop: timed on {plain.tasks} of the {tasks} tasks, and scaled)")
    return "\n".join(
        [
            f"{result.name}: {recipe.name}, {recipe.episode.describe()}, {recipe.episode.n_queries} queries, "
            f"{size}x{size}, {tasks} task{'' if tasks == 1 else 's'}" + (f", {how}" if how else ""),
            f"on {about['device']}; {about['engine']} engine, {about['precision']}; torch {about['torch']}; "
            f"{about['data']}; median of {about['repeats']}, {about['date'][:10]}",
            "",
            *aligned(rows, numbers=True),
            *below,
        ]
    )


def _row(name: str, measured: "Measurement[object]", timed: int, tasks: int) -> tuple[str, ...]:
    """A row without the warm-up, scaled up if only some of the tasks were timed."""
    scale, seconds = tasks / timed, measured.seconds * tasks / timed
    return (
        name,
        f"{seconds:.3f}",
        f"{scale * min(measured.rounds):.3f}",
        f"{scale * max(measured.rounds):.3f}",
        f"{1000 * seconds / tasks:.1f}",
        f"{tasks / seconds:.2f}",
        f"{measured.memory.peak:.2f}",
    )


if __name__ == "__main__":
    main(study)
