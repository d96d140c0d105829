"""Pages about runs: `trident report` and `trident compare`."""

from pathlib import Path
from typing import Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError, one_line
from trident.learning.weights_header import check_run


@app.command(short_help="Make an HTML page about a run.")
def report(
    run: opt.RunPath,
    out: Annotated[
        Path | None, typer.Option(help="The page to write; by default report.html in the run's folder.")
    ] = None,
    data: opt.Data = None,
    temperature_data: opt.TemperatureData = None,
    split: opt.Split = "val",
    tasks: Annotated[int, typer.Option(min=2, help="Tasks for accuracy and calibration.")] = 600,
    audit_tasks: Annotated[int, typer.Option(min=2, help="Tasks for each line of the audit.")] = 100,
    seed: opt.Seed = 0,
    tasks_per_chunk: opt.Chunk = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Make one self-contained HTML page about a run: accuracy, audit, calibration, latents, reconstructions, settings.

    Needs the 'analysis' extra. With another dataset (--data) it is a cross-domain report.
    """
    check_run(run)
    from trident.cli.console import Counter, say
    from trident.files import check_writable, write_file
    from trident.measuring.subject import Sample
    from trident.report.content import make_report
    from trident.report.page import check_extras, report_page

    checkpoint = opt.load_for_measuring(run, None)
    page = out or (run / "report.html" if run.is_dir() else run.with_name(f"{run.stem}-report.html"))
    check_writable(page)
    check_extras()
    store = opt.open_for(checkpoint.recipe, data, checkpoint)
    fitting_store = opt.open_fitting_data(temperature_data, checkpoint, store)
    sample = Sample(split=split, tasks=tasks, seed=seed, device=opt.device_of(device), tasks_per_chunk=tasks_per_chunk)
    with Counter("report") as progress:
        content = make_report(checkpoint, store, fitting_store, audit_tasks, progress.stage, **sample)
    if caution := checkpoint.caution(store, split):
        say(caution)
    write_file(page, report_page(content))
    if as_json:
        opt.print_json({**content.to_json(), "page": str(page)})
        return
    evaluation = content.calibration.evaluation
    print(f"accuracy {evaluation.accuracy:.2f} ± {evaluation.ci95:.2f} %")
    print(f"({evaluation.describe_protocol()}; {checkpoint.describe()})")
    print(content.audit.verdict())
    say(f"report: {page}")


@app.command(short_help="Compare runs.")
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Runs' folders, weights files, or names of weights."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write an HTML page as well.")] = None,
    data: opt.Data = None,
    split: opt.Split = "val",
    tasks: Annotated[int, typer.Option(min=2, help="Number of tasks for each run.")] = 200,
    seed: opt.Seed = 0,
    tasks_per_chunk: opt.Chunk = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Compare runs: accuracy on the same tasks with paired differences, calibration, settings that differ."""
    if len(runs) < 2:
        raise TridentError("a comparison needs at least two runs: trident compare RUN RUN...")
    for run in runs:
        check_run(run)
    from trident.cli.console import Counter
    from trident.files import check_writable, write_file
    from trident.measuring.subject import Sample
    from trident.report.content import compare as measure
    from trident.report.page import check_extras, comparison_page

    if out is not None:
        check_writable(out)
        check_extras()
    checkpoints = [opt.load_for_measuring(run, None) for run in runs]
    stores = [opt.open_for(entry.recipe, data, entry) for entry in checkpoints]
    sample = Sample(split=split, tasks=tasks, seed=seed, device=opt.device_of(device), tasks_per_chunk=tasks_per_chunk)
    with Counter("comparing") as progress:
        result = measure(checkpoints, stores, progress.stage, **sample)
    if out is not None:
        write_file(out, comparison_page(result))
    if as_json:
        opt.print_json(result.to_json())
        return
    width = max(len(one_line(each.name)) for each in result.runs)
    for each in result.runs:
        difference = f"  {each.difference[0]:+.2f} ± {each.difference[1]:.2f} points" if each.difference else ""
        print(
            f"{one_line(each.name):{width}}  {each.evaluation.accuracy:6.2f} ± {each.evaluation.ci95:.2f} %  "
            f"ECE {each.calibration.ece:.4f}  {each.parameters:>9,} parameters{difference}"
        )
    for each in result.runs:
        print(f"({one_line(each.name)}: {each.evaluation.describe_protocol()}; {each.checkpoint.describe()})")
    for key, values in result.differing_settings().items():
        print(one_line(f"{key}: {' | '.join(map(str, values))}"))
