"""Measuring a trained model: `trident evaluate`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.distributed.torchrun import launched
from trident.errors import TridentError, did_you_mean
from trident.learning.weights_header import check_run

if TYPE_CHECKING:
    from trident.cli.console import Counter
    from trident.data.store import ImageStore
    from trident.distributed.processes import Processes
    from trident.learning.checkpoint import Checkpoint
    from trident.measuring.evaluate import Evaluation
    from trident.measuring.subject import Sample

TASKS, AUDIT_TASKS, DECOUPLING_TASKS = 600, 200, 100  # by default


class Job(NamedTuple):
    """What all parts of a measurement need."""

    checkpoint: "Checkpoint"
    store: "ImageStore"
    sample: "Callable[[int], Sample]"  # given the default number of tasks
    progress: "Counter"
    processes: "Processes"
    figure: Callable[[str, Callable[[], Any]], None]  # draws the figure of a part, if it is wanted


Part = tuple[dict[str, Any], list[str]]  # values for --json, lines to print


@app.command(context_settings=opt.SETTINGS, short_help="Measure accuracy, and with --also audit, calibration and more.")
def evaluate(
    run: opt.RunPath,
    settings: opt.Settings = None,
    also: Annotated[
        str,
        typer.Option(
            metavar="PART,...",
            help="Measure more: audit, calibration, decoupling, reconstructions, or several of them.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Draw the figure of a part to this .svg, .png or .pdf file. With several, the part's name is added "
            "to the file's."
        ),
    ] = None,
    data: opt.Data = None,
    split: opt.Split = "val",
    tasks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help=f"Number of tasks.  [default: {TASKS}; audit: {AUDIT_TASKS}, decoupling: {DECOUPLING_TASKS}]",
        ),
    ] = None,
    seed: opt.Seed = 0,
    temperature: Annotated[
        Literal["validation", "paper", "none"],
        typer.Option(
            help="For calibration: fit a softmax temperature on validation tasks, or (paper) on the scored "
            "predictions, or use none."
        ),
    ] = "validation",
    temperature_data: opt.TemperatureData = None,
    temperature_tasks: Annotated[int, typer.Option(min=2, help="Validation tasks to fit the temperature on.")] = 200,
    tasks_per_chunk: opt.Chunk = None,
    device: opt.Device = "auto",
    engine: opt.EngineName = "auto",
    precision: opt.PrecisionName = "auto",
    store_on: opt.StoreOn = "auto",
    as_json: opt.Json = False,
) -> None:
    """Measure accuracy, by default on tasks from the validation classes and with the settings of the run.

    Settings override those of the run, for example episode.n_shot=5, protocol.query_order=class_sorted,
    protocol.balance=dirichlet, protocol.queries_at_once=one or, for methods with inner steps, inner_steps=0.
    On several GPUs, accuracy and audit: torchrun --nproc-per-node 4 -m trident evaluate RUN.

    \b
    --also audit            accuracy under every protocol, on the same tasks: query order, class counts, queries one at
                            a time, batch norm, latents. Each line changes one thing about the default protocol; the
                            differences are paired by task. The run's own protocol is ignored.
    --also calibration      how far confidences can be trusted: ECE, MCE (10 bins, top label) and Brier score
    --also decoupling       which latent separates the classes: Davies-Bouldin scores before and after adaptation,
                            and UMAP projections of the first task. Needs the 'analysis' extra.
    --also reconstructions  images decoded from the latents of one task's queries, and with z_semantic swapped
    """
    from trident.cli.console import Counter, say

    parts = [part for part in also.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise TridentError(f"--also {part}: there is no such part{did_you_mean(part, PARTS)}")
    figure = _figures(parts, out)
    check_run(run)
    if temperature != "validation" and temperature_data is not None:
        raise TridentError("--temperature-data is for --temperature validation: omit one of them")
    if launched() is not None and set(parts) - {"audit"}:
        raise TridentError(f"--also {also} works in one process: start it without torchrun")

    def load() -> "Checkpoint":
        checkpoint = opt.load_for_measuring(run, settings)
        if "audit" in parts and checkpoint.recipe.protocol != opt.load_for_measuring(run, None).recipe.protocol:
            raise TridentError("an audit measures all protocols: omit settings of the protocol")
        return checkpoint

    with opt.on_processes(device) as here:
        from trident.learning.checkpoint import check_same_inputs, checkpoint_from_first
        from trident.measuring.evaluate import evaluate as measure

        checkpoint = checkpoint_from_first(here.processes, load)
        store = here.processes.on_each(lambda: opt.open_for(checkpoint.recipe, data, checkpoint, store_on, split))
        check_same_inputs(here.processes, checkpoint.recipe, store)
        fitted = "calibration" in parts and temperature == "validation"
        fitting_store = opt.open_fitting_data(temperature_data, checkpoint, store) if fitted else None

        def sample(default: int) -> "Sample":
            chosen: Sample = {"split": split, "tasks": tasks or default, "seed": seed, "device": here.device}
            return {**chosen, "engine": engine, "precision": precision, "tasks_per_chunk": tasks_per_chunk}

        with Counter("evaluating tasks") as progress:
            job = Job(checkpoint, store, sample, progress, here.processes, figure)
            # Parts that not every model has come first, so that a refusal costs no time.
            measured = {part: PARTS[part](job) for part in reversed(PARTS) if part in parts and part != "calibration"}
            if "calibration" in parts:
                result, measured["calibration"] = _calibration(job, temperature, fitting_store, temperature_tasks)
            else:
                result = measure(checkpoint, store, progress=progress, **sample(TASKS), processes=here.processes)
    if not here.processes.first:
        return
    if caution := checkpoint.caution(store, split):
        say(caution)
    shown = [measured[part] for part in PARTS if part in parts]
    if as_json:
        values = {key: value for part, _ in shown for key, value in part.items()}
        opt.print_json({**result.to_json(), **values, "weights": checkpoint.summary()})
        return
    print(f"accuracy {result.accuracy:.2f} ± {result.ci95:.2f} %")
    print(f"({result.describe_protocol()}; {checkpoint.describe()})")
    for _, lines in shown:
        print("\n".join(["", *lines]))


def _figures(parts: list[str], out: Path | None) -> Callable[[str, Callable[[], Any]], None]:
    """Draws the figures that are wanted. That they can be written is checked now, before long work."""
    drawn = [part for part in parts if part != "audit"]
    if out is None:
        if "reconstructions" in parts:
            raise TridentError("reconstructions are a picture: give --out FILE, for example --out reconstructions.png")
        return lambda _part, _draw: None
    if not drawn:
        raise TridentError("--out is for a figure of --also calibration, decoupling or reconstructions")
    from trident.report.figures import check_figure_path, save_figure

    files = {part: out.with_stem(f"{out.stem}-{part}") if drawn[1:] else out for part in drawn}
    for file in files.values():
        check_figure_path(file)
    return lambda part, draw: save_figure(draw(), files[part])


def _audit(job: Job) -> Part:
    from trident.measuring.audit import audit

    sample, progress = job.sample(AUDIT_TASKS), job.progress.stage
    result = audit(job.checkpoint, job.store, progress=progress, processes=job.processes, **sample)
    default, *others = result.rows
    rows = [("protocol", "accuracy, %", "difference, points")]
    for row in result.rows:
        accuracy = f"{row.evaluation.accuracy:.2f} ± {row.evaluation.ci95:.2f}"
        rows.append((row.name, accuracy, row.describe_difference() if row in others else ""))
    lines = opt.aligned(rows, numbers=True)
    lines += [f"{name}: no result: {why}" for name, why in result.without_result.items()]
    lines += [f"(default: {default.evaluation.describe_protocol()}; {job.checkpoint.describe()})", result.verdict()]
    return {"audit": result.to_json()}, lines


def _calibration(
    job: Job, temperature: Literal["validation", "paper", "none"], fitting_store: "ImageStore | None", tasks: int
) -> "tuple[Evaluation, Part]":
    """And the accuracy on the same tasks."""
    from trident.measuring.calibration import calibrate
    from trident.report.figures import reliability_diagram

    result = calibrate(job.checkpoint, job.store, temperature, fitting_store, tasks, job.progress, **job.sample(TASKS))
    job.figure("calibration", lambda: reliability_diagram(result.panels()))
    values = result.to_json()
    lines = [
        f"ECE {entry.ece:.4f}  MCE {entry.mce:.4f}  Brier {entry.brier:.4f}  with {entry.describe()}"
        for _, entry in result.panels()
    ]
    return result.evaluation, ({key: values[key] for key in ("calibration", "with_temperature")}, lines)


def _decoupling(job: Job) -> Part:
    from trident.measuring.decoupling import decoupling, projected_panels
    from trident.report.figures import latent_plot

    sample = job.sample(DECOUPLING_TASKS)
    result = decoupling(job.checkpoint, job.store, progress=job.progress, **sample)
    job.figure("decoupling", lambda: latent_plot(projected_panels(result, sample["seed"]), result.shown.labels[0]))
    rows = [("Davies-Bouldin score", "before", "after", "change (lower: classes better separated)")]
    for name, change in result.changes.items():
        difference = f"{change.change:+.4f} ± {change.change_ci95:.4f}"
        rows.append((f"z_{name}", f"{change.before:.4f}", f"{change.after:.4f}", difference))
    lines = [*opt.aligned(rows), f"({result.protocol}; {job.checkpoint.describe()})", result.verdict()]
    return {"decoupling": result.to_json()}, lines


def _reconstructions(job: Job) -> Part:
    from trident.measuring.latents import reconstructions
    from trident.report.figures import reconstruction_plot

    sample = job.sample(TASKS)
    split, seed, device = sample["split"], sample["seed"], sample.get("device", "cpu")
    result = reconstructions(job.checkpoint, job.store, split=split, seed=seed, device=device)
    job.figure("reconstructions", lambda: reconstruction_plot(result))
    errors = {"squared_error": result.squared_error, "squared_error_of_mean": result.squared_error_of_mean}
    protocol = f"({result.protocol}, task 0 of seed {seed}; {job.checkpoint.describe()})"
    return {"reconstructions": errors}, [f"{result.describe()}.", protocol]


PARTS: dict[str, Callable[..., Any]] = {
    "audit": _audit,
    "calibration": _calibration,
    "decoupling": _decoupling,
    "reconstructions": _reconstructions,
}
