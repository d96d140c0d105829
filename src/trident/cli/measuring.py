"""Measuring a trained model: `trident evaluate`."""

import json
from typing import Annotated, Literal

import typer

from trident.cli.app import app
from trident.cli.options import (
    SETTINGS,
    Chunk,
    Data,
    Device,
    EngineName,
    Json,
    PrecisionName,
    RunPath,
    Seed,
    Settings,
    Split,
    Tasks,
    data_of,
    load_for_measuring,
    open_data,
    sample_of,
)


@app.command(context_settings=SETTINGS, short_help="Measure accuracy.")
def evaluate(
    run: RunPath,
    settings: Settings = None,
    data: Data = None,
    split: Split = "test",
    tasks: Tasks = 600,
    seed: Seed = 0,
    n_way: Annotated[int | None, typer.Option(min=1, help="Classes in a task.")] = None,
    n_shot: Annotated[int | None, typer.Option(min=1, help="Labelled images of each class.")] = None,
    n_query: Annotated[int | None, typer.Option(min=1, help="Queries per class.")] = None,
    query_order: Annotated[
        Literal["shuffled", "class_sorted"] | None,
        typer.Option(help="class_sorted shows a positional AttFEX the classes of the queries."),
    ] = None,
    queries_at_once: Annotated[
        Literal["all", "one"] | None, typer.Option(help="one: each query is a task of its own.")
    ] = None,
    balance: Annotated[
        Literal["balanced", "dirichlet"] | None,
        typer.Option(help="As many queries of each class, or Dirichlet-distributed counts."),
    ] = None,
    dirichlet_alpha: Annotated[float | None, typer.Option(help="Concentration behind --balance dirichlet.")] = None,
    batch_norm: Annotated[
        Literal["transductive", "support", "running"] | None,
        typer.Option(help="Statistics of the images at hand, of the support set, or of training."),
    ] = None,
    latents: Annotated[
        Literal["sample", "mean", "average"] | None,
        typer.Option(help="One sample, the mean, or the average of many predictions."),
    ] = None,
    latent_samples: Annotated[int | None, typer.Option(min=1, help="Samples behind --latents average.")] = None,
    inner_steps: Annotated[int | None, typer.Option(min=0, help="Inner steps, if other than in training.")] = None,
    tasks_per_chunk: Chunk = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
    as_json: Json = False,
) -> None:
    """Measure accuracy, by default on tasks from the test classes. What is not given is as in training.

    Settings such as adaptation.refinements=0 override the run's own, as the options do.
    """
    from trident.cli.console import counting
    from trident.measuring.evaluate import evaluate_checkpoint

    given = {
        "episode.n_way": n_way,
        "episode.n_shot": n_shot,
        "episode.n_query": n_query,
        "protocol.query_order": query_order,
        "protocol.queries_at_once": queries_at_once,
        "protocol.balance": balance,
        "protocol.dirichlet_alpha": dirichlet_alpha,
        "protocol.batch_norm": batch_norm,
        "protocol.latents": latents,
        "protocol.latent_samples": latent_samples,
        "adaptation.steps": inner_steps,
    }
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    checkpoint = load_for_measuring(run, [*(settings or []), *options])
    store = open_data(data_of(checkpoint.recipe, data, checkpoint))
    sample = sample_of(split, tasks, seed, device, tasks_per_chunk, engine, precision)
    with counting("evaluating tasks") as progress:
        result = evaluate_checkpoint(checkpoint, store, progress=progress, **sample)
    if as_json:
        print(json.dumps({**result.to_json(), "weights": checkpoint.describe()}, allow_nan=False))
    else:
        print(f"accuracy {result.accuracy:.2f} ± {result.ci95:.2f} %")
        print(f"({result.describe_protocol()}; {checkpoint.described()})")
