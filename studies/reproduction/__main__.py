"""The paper, run again: `python -m studies.reproduction`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trident.cli.app import main
from trident.cli.options import Device, Json, aligned, device_of, open_data
from trident.errors import TridentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from studies.reproduction.panels import Model, Panel, Reproduction
    from studies.reproduction.running import Runner
    from trident.data.store import ImageStore


study = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@study.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Tables and figures to run. Omit them for a list.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="A store; give several with several --data.")] = None,
    cub: Annotated[str | None, typer.Option(help="The store of CUB.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the trainings.")] = Path("runs/reproduction"),
    budget: Annotated[float, typer.Option(min=0.0001, max=100, help="Multiplies the steps of trainings.")] = 1.0,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="auto|ADDRESS", help="Spread trainings over a Ray cluster, as 'trident ablate' does."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore the included results.")] = False,
    document: Annotated[
        Path | None, typer.Option(help="Write this document (Markdown); if there is one, its introduction stays.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write this HTML page.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write the figures as SVG files into this folder.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of results; default: OUT/results, or the included ones.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Another list of tables and figures, a TOML file.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run the tables and figures of the paper again, with ours beside the published values.

    \b
    python -m studies.reproduction                       list them, and which are run
    python -m studies.reproduction calibration           show one, as far as it is run
    python -m studies.reproduction stand-in --data tiny.store       run what one still lacks, or resume it
    python -m studies.reproduction calibration --data mini.store --fresh --out runs/again       run it again
    python -m studies.reproduction --document d.md --page p.html    write both from the kept results

    Models are measured with queries sorted by class, as the paper's released code does, and with the same queries
    shuffled. Several processes may work on one table at a time: give each the same command. New results are kept in
    OUT/results, together with the included ones. A training takes three to five minutes alone on an H200, and
    far longer on a CPU.
    """
    from studies.reproduction.panels import FILE, load_panels
    from studies.reproduction.results import FOLDER, has_results

    reproduction = load_panels(file or FILE)
    own = out / "results"
    kept = results or (own if names or has_results(own) else FOLDER)
    to_run = data or cub or cluster or fresh or budget != 1
    _check_outputs(document, page, figures)
    if names:
        panels = [reproduction.panel(name) for name in dict.fromkeys(names)]
        runner = _runner(data or [], cub, out, kept, device, budget, fresh)
        unmeasured = [one for panel in panels for one in _unmeasured(reproduction, panel, runner)]
        needed = {name for model, dataset in unmeasured for name in (model.data[0], dataset)}
        missing = sorted(needed - runner.stores.keys())
        only_show = not to_run and missing
        if not only_show:
            for dataset in sorted(needed):  # before any training
                runner.store(dataset)
            if unmeasured:
                runner.prepare()
                _announce([model for model, _ in unmeasured if model.recipe], runner)
            elif to_run:
                runner.say("nothing is left to run")
        kept = kept if has_results(kept) else FOLDER
        for panel in panels:
            if not only_show:
                _run(reproduction, panel, runner, cluster)
            if not as_json:
                _show(reproduction, panel, kept)
        if as_json:
            print(json.dumps([_as_json(reproduction, panel, kept) for panel in panels]))
        if only_show:
            runner.say(f"the rest is not run: for it, give the stores of {', '.join(missing)} with --data STORE")
    else:
        if to_run:
            raise TridentError("run what? Name a table or figure; without names, they are listed")
        if results is not None and not results.is_dir():
            raise TridentError(f"there is no folder of results at {results}")
        if kept == own and results is None:
            _say(f"from the results in {own}; for the included ones, give another folder with --out")
    if document or page or figures:
        _write(reproduction, kept, document, page, figures)
    elif not names:
        _list(reproduction, kept, as_json)


def _check_outputs(document: Path | None, page: Path | None, figures: Path | None) -> None:
    from studies.reproduction.document import introduction_of
    from trident.files import check_writable

    if figures is not None and figures.exists() and not figures.is_dir():
        raise TridentError(f"--figures {figures} is a file: it must be a folder")
    for path in (document, page, figures if figures and not figures.exists() else None):
        if path is not None:
            check_writable(path)
    if document is not None:
        introduction_of(document)


def _runner(
    sources: list[str], cub: str | None, out: Path, kept: Path, device: str, budget: float, fresh: bool
) -> "Runner":
    from studies.reproduction.running import Runner
    from trident.cli.console import Counter, TrainingProgress

    stores: dict[str, tuple[str, ImageStore]] = {}
    for given in ["glyphs", *sources, *([cub] if cub else [])]:
        source = given if given == "glyphs" else str(Path(given).resolve())
        store = open_data(source)
        if given == cub and store.dataset != "cub":
            raise TridentError(f"--cub {cub} holds {store.dataset}, not cub")
        if store.dataset in stores and given != "glyphs":
            raise TridentError(f"{given} and {stores[store.dataset][0]} are both stores of {store.dataset}: give one")
        stores[store.dataset] = (source, store)

    return Runner(stores, out, kept, fresh, device_of(device), budget, _say, TrainingProgress, Counter)


def _say(text: str) -> None:
    from trident.cli.console import stderr

    stderr.print(text, soft_wrap=True)


def _announce(models: "Sequence[Model]", runner: "Runner") -> None:
    """Say what will be trained, because that may take days."""
    steps = {model.name: model.asked_steps(runner.budget) for model in models}
    if steps:
        told = ", ".join(f"{name} ({count:,} steps)" for name, count in steps.items())
        runner.say(f"to train: {told}; Ctrl-C saves what is done")
        if runner.device == "cpu":
            runner.say("on a CPU, a training on photographs takes days: use a GPU, or a small --budget")


def _unmeasured(reproduction: "Reproduction", panel: "Panel", runner: "Runner") -> "list[tuple[Model, str]]":
    """The models of a panel, with each dataset that they are not measured on yet."""
    return [
        (model, dataset)
        for model in reproduction.models_of(panel)
        for dataset in panel.datasets_of(model)
        if not runner.complete(panel, model, dataset, reproduction.tasks[dataset])
    ]


def _run(reproduction: "Reproduction", panel: "Panel", runner: "Runner", cluster: str | None) -> None:
    wanted = _unmeasured(reproduction, panel, runner)
    trained = {model.name: model for model, _ in wanted if model.recipe}
    for dataset in sorted({model.data[0] for model in trained.values()}):
        for model in _train([one for one in trained.values() if one.data[0] == dataset], runner, cluster):
            # Each is measured before the next is trained. Another process may have been faster.
            for same, measured_on in _unmeasured(reproduction, panel, runner):
                if same.name == model.name:
                    runner.measure(reproduction, panel, model, measured_on)
    for model, dataset in wanted:
        if not model.recipe and not runner.complete(panel, model, dataset, reproduction.tasks[dataset]):
            runner.measure(reproduction, panel, model, dataset)


def _train(models: "list[Model]", runner: "Runner", cluster: str | None) -> "Iterator[Model]":
    """Train models, and yield each when it is finished. Those that another process works on are left to it."""
    run = runner.training(models)
    if cluster is None:
        run.check()
    else:
        from trident.grids.on_cluster import run_on_cluster

        _resume_later(run_on_cluster(run, cluster, open_data), runner)
    for model, cell in zip(models, run.grid.cells, strict=True):
        if not run.finished(cell):
            step = run.run_cell(cell)
            _resume_later(None if step is None else f"{cell.name} after step {step}", runner)
        if run.finished(cell):
            yield model


def _resume_later(stopped: str | None, runner: "Runner") -> None:
    if stopped is not None:
        runner.say(f"stopped in {stopped}; run the same command again to resume")
        raise typer.Exit(130)


def _show(reproduction: "Reproduction", panel: "Panel", kept: Path) -> None:
    from studies.reproduction.sections import section

    found = section(reproduction, panel, kept)
    table = [*aligned([found.headings, *found.rows]), ""] if found.headings else []
    print("\n".join([f"{panel.place}: {panel.title}", "", *table, *found.notes]))


def _as_json(reproduction: "Reproduction", panel: "Panel", kept: Path) -> dict[str, Any]:
    from studies.reproduction.sections import section

    found = section(reproduction, panel, kept)
    rows = [dict(zip(found.headings, row, strict=True)) for row in found.rows]
    return _described(panel, found.state) | {"rows": rows, "notes": found.notes}


def _write(
    reproduction: "Reproduction", kept: Path, document: Path | None, page: Path | None, figures: Path | None
) -> None:
    from studies.reproduction.document import introduction_of, whole_document
    from studies.reproduction.document import page as make_page
    from trident.files import write_file

    made = []
    if document is not None:
        made.append((document, whole_document(introduction_of(document), reproduction, kept)))
    if page is not None:
        made.append((page, make_page(reproduction, kept)))
    for path, content in made:
        write_file(path, content)
        _say(f"wrote {path}")
    if figures is not None:
        from studies.reproduction.plots import all_plots
        from trident.report.figures import save_figure

        figures.mkdir(exist_ok=True)
        plots = all_plots(reproduction, kept)
        for name, figure in plots.items():
            save_figure(figure, figures / f"reproduction-{name}.svg")
        _say(f"wrote {len(plots)} figures to {figures}")


def _list(reproduction: "Reproduction", kept: Path, as_json: bool) -> None:
    from studies.reproduction.states import state

    found = [_described(panel, state(reproduction, panel, kept)) for panel in reproduction.panels]
    if as_json:
        print(json.dumps(found))
        return
    print("\n".join(aligned([(one["name"], one["state"], f"{one['place']}: {one['title']}") for one in found])))


def _described(panel: "Panel", state: str) -> dict[str, Any]:
    return {"name": panel.name, "place": panel.place, "title": panel.title, "state": state}


if __name__ == "__main__":
    main(study)
