"""Analysing a trained model: `trident audit`, `calibrate`, `decoupling` and `reconstructions`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trident.cli.app import app
from trident.cli.options import (
    SETTINGS,
    Chunk,
    Data,
    Device,
    Json,
    RunPath,
    Seed,
    Settings,
    Split,
    Tasks,
    device_of,
    load_for_measuring,
    open_fitting_data,
    open_for,
    print_caution,
    sample_of,
)
from trident.cli.processes import on_processes
from trident.errors import TridentError

if TYPE_CHECKING:
    from trident.learning.checkpoint import Checkpoint

Figure = Annotated[Path | None, typer.Option("--out", help="Draw the figure to this file: .svg, .png or .pdf.")]


@app.command(context_settings=SETTINGS, short_help="Measure under every protocol.")
def audit(
    run: RunPath,
    settings: Settings = None,
    data: Data = None,
    split: Split = "val",
    tasks: Tasks = 200,
    seed: Seed = 0,
    tasks_per_chunk: Chunk = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure one model under every protocol, on the same tasks, and say what its accuracy depends on.

    Each line changes one thing about the default protocol: query order, class counts, queries one at a time, the source
    of the batch-norm statistics, the latents. The differences are paired by task. The run's own protocol is ignored.
    Its episode and method settings are used, and can be overridden.
    On several GPUs: torchrun --nproc-per-node 4 -m trident audit RUN.
    """
    from trident.cli.console import counting
    from trident.measuring.audit import audit as measure

    def load() -> "Checkpoint":
        checkpoint = load_for_measuring(run, settings)
        if checkpoint.recipe.protocol != load_for_measuring(run, None).recipe.protocol:
            raise TridentError("an audit measures all protocols: omit settings of the protocol")
        return checkpoint

    with on_processes(device) as here:
        checkpoint, store = here.measured(load, data, "auto", split)
        sample = sample_of(split, tasks, seed, here.device, tasks_per_chunk)
        with counting("protocols") as progress:
            result = measure(checkpoint, store, progress=progress.stage, **sample, processes=here.processes)
    if not here.processes.first:
        return
    print_caution(checkpoint, store, split)
    if as_json:
        print(json.dumps({**result.to_json(), "weights": checkpoint.summary()}, allow_nan=False))
        return
    print(f"{'protocol':26} {'accuracy, %':>16} {'difference, points':>20}")
    for row in result.rows:
        accuracy = f"{row.evaluation.accuracy:.2f} ± {row.evaluation.ci95:.2f}"
        difference = row.describe_difference() if row is not result.rows[0] else ""
        print(f"{row.name:26} {accuracy:>16} {difference:>20}")
    for name, why in result.without_result.items():
        print(f"{name:26} no result: {why}")
    print(f"(default: {result.rows[0].evaluation.describe_protocol()}; {checkpoint.describe()})")
    print(result.verdict())


@app.command(context_settings=SETTINGS, short_help="See how far confidences can be trusted.")
def calibrate(
    run: RunPath,
    settings: Settings = None,
    data: Data = None,
    split: Split = "val",
    tasks: Tasks = 600,
    seed: Seed = 0,
    temperature: Annotated[
        Literal["validation", "paper", "none"],
        typer.Option(
            help="Fit a softmax temperature on validation tasks, or (paper) on the scored predictions, or use none."
        ),
    ] = "validation",
    temperature_data: Annotated[
        str | None, typer.Option(help="Store to fit the temperature on; default: the training data.")
    ] = None,
    temperature_tasks: Annotated[int, typer.Option(min=2, help="Validation tasks to fit the temperature on.")] = 200,
    out: Figure = None,
    tasks_per_chunk: Chunk = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure how far the model's confidences can be trusted: ECE, MCE (10 bins, top label) and Brier score.

    Settings such as protocol.query_order=shuffled override those of the run.
    """
    from trident.cli.console import counting
    from trident.measuring.calibration import calibrate as measure
    from trident.report.figures import check_figure_path

    check_figure_path(out)
    if temperature != "validation" and temperature_data is not None:
        raise TridentError("--temperature-data is for --temperature validation: omit one of them")
    checkpoint = load_for_measuring(run, settings)
    store = open_for(checkpoint.recipe, data, checkpoint)
    fitting_store = open_fitting_data(temperature_data, checkpoint, store) if temperature == "validation" else None
    sample = sample_of(split, tasks, seed, device, tasks_per_chunk)
    with counting("evaluating tasks") as progress:
        result = measure(checkpoint, store, temperature, fitting_store, temperature_tasks, progress, **sample)
    print_caution(checkpoint, store, split)
    if out is not None:
        from trident.report.figures import reliability_diagram, save_figure

        save_figure(reliability_diagram(result.panels()), out)
    if as_json:
        print(json.dumps({**result.to_json(), "weights": checkpoint.summary()}, allow_nan=False))
        return
    print(f"accuracy {result.evaluation.accuracy:.2f} ± {result.evaluation.ci95:.2f} %")
    for _, entry in result.panels():
        print(f"ECE {entry.ece:.4f}  MCE {entry.mce:.4f}  Brier {entry.brier:.4f}  with {entry.describe()}")
    print(f"({result.evaluation.describe_protocol()}; {checkpoint.describe()})")


@app.command(context_settings=SETTINGS, short_help="See which latent separates the classes.")
def decoupling(
    run: RunPath,
    settings: Settings = None,
    data: Data = None,
    split: Split = "val",
    tasks: Tasks = 100,
    seed: Seed = 0,
    out: Figure = None,
    tasks_per_chunk: Chunk = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Show which latent separates the classes: Davies-Bouldin scores before and after adaptation.

    Lower scores mean better separated classes. --out draws UMAP projections of the first task. Needs the 'analysis'
    extra.
    """
    from trident.cli.console import counting
    from trident.measuring.decoupling import decoupling as measure
    from trident.report.figures import check_figure_path

    check_figure_path(out)
    checkpoint = load_for_measuring(run, settings)
    store = open_for(checkpoint.recipe, data, checkpoint)
    sample = sample_of(split, tasks, seed, device, tasks_per_chunk)
    with counting("tasks") as progress:
        result = measure(checkpoint, store, progress=progress, **sample)
    if out is not None:
        from trident.measuring.decoupling import projected_panels
        from trident.report.figures import latent_plot, save_figure

        panels = [(panel.title(), panel.points) for panel in projected_panels(result, seed)]
        save_figure(latent_plot(panels, result.shown.labels[0]), out)
    if as_json:
        print(json.dumps({**result.to_json(), "weights": checkpoint.summary()}, allow_nan=False))
        return
    print(f"{'Davies-Bouldin score':22} {'before':>8} {'after':>8}   change (lower: classes better separated)")
    for name, change in result.changes.items():
        print(
            f"{'z_' + name:22} {change.before:8.4f} {change.after:8.4f}   "
            f"{change.change:+.4f} ± {change.change_ci95:.4f}"
        )
    print(f"({result.protocol}; {checkpoint.describe()})")
    print(result.verdict())


@app.command(context_settings=SETTINGS, short_help="Draw images decoded from the latents.")
def reconstructions(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The picture to write, for example reconstructions.png.")],
    settings: Settings = None,
    data: Data = None,
    split: Split = "val",
    task: Annotated[int, typer.Option(min=0, help="Number of the task to draw.")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Draw a task's queries, their reconstructions, and images with z_semantic swapped between queries."""
    from trident.measuring.reconstruction import reconstructions as decode
    from trident.report.figures import check_figure_path, reconstruction_plot, save_figure

    check_figure_path(out)
    checkpoint = load_for_measuring(run, settings)
    store = open_for(checkpoint.recipe, data, checkpoint)
    result = decode(checkpoint, store, split=split, seed=seed, task=task, device=device_of(device))
    save_figure(reconstruction_plot(result), out)
    spec = checkpoint.recipe.episode
    print(f"{result.describe()}.")
    print(
        f"({store.dataset} {split}, {spec.describe()}, {spec.describe_queries()}, "
        f"{checkpoint.recipe.describe_protocol()}, task {task} of seed {seed}; {checkpoint.describe()})"
    )
