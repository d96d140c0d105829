"""The paper's results: `python -m studies.reproduction.paper`."""

import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trident.cli.app import main
from trident.cli.options import Json, aligned

if TYPE_CHECKING:
    from studies.reproduction.paper_results import PaperResult, PaperTable

TableName = Literal[
    "accuracy",
    "calibration",
    "calibration-cross-domain",
    "ablation-training",
    "ablation-latents",
    "ablation-attfex-width",
    "attfex",
    "parameters",
    "conv4",
    "training",
]
WIDTH = 80  # of the output, also in a pipe
_LABELS = ("method", "part", "backbone", "approach", "settings")


study = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@study.command()
def paper(
    table: Annotated[TableName | None, typer.Option(help="Show only this table.")] = None,
    as_json: Json = False,
) -> None:
    """List the results of the TRIDENT paper, how they were obtained and which are doubtful."""
    from dataclasses import asdict

    from studies.reproduction.paper_results import (
        PAPER_PROTOCOL,
        paper_table,
        paper_tables,
        paper_training,
        paper_training_notes,
    )

    with_training = table is None or table == "training"
    tables = paper_tables() if table is None else () if table == "training" else (paper_table(table),)
    if as_json:
        found: dict[str, Any] = {"protocol": PAPER_PROTOCOL, "tables": [asdict(one) for one in tables]}
        if with_training:
            found["training"] = {
                "notes": paper_training_notes(),
                "runs": [asdict(run) for run in paper_training()],
            }
        print(json.dumps(found, allow_nan=False))
        return
    blocks = [_shown(one) for one in tables] + ([_training()] if with_training else [])
    measured = [result for one in tables for result in one.results if result.metric != "parameters"]
    if any(result.method == "TRIDENT" for result in measured):
        blocks.append(textwrap.fill(f"How TRIDENT's figures were obtained: {PAPER_PROTOCOL}", WIDTH))
    print("\n\n".join(blocks))


def _shown(table: "PaperTable") -> str:
    """The table as text: a part for each pair of datasets, a line for each method, then notes."""
    places: dict[tuple[str | None, str | None], list[PaperResult]] = {}
    for result in table.results:
        places.setdefault((result.train_dataset, result.test_dataset), []).append(result)
    notes = list(dict.fromkeys(result.note for results in places.values() for result in results))
    footnotes = [note for note in notes if note] if len(notes) > 1 else []  # a note on all figures needs no mark
    parts = [f"{table.name}: {table.title}"]
    for place, results in places.items():
        names = [name for name in dict.fromkeys(place) if name is not None]
        if names:
            parts.append(f"{' → '.join(names)}, {results[0].n_way}-way")
        parts.append(_grid(results, footnotes))
    below = [_note(note, f"[{number}]") for number, note in enumerate(footnotes, 1)]
    below += [_note(note) for note in (*table.notes, *(notes if not footnotes else ())) if note]
    return "\n\n".join([*parts, "\n".join(below)])


def _grid(results: "list[PaperResult]", footnotes: list[str]) -> str:
    labels = [name for name in _LABELS if any(getattr(result, name) for result in results)]
    columns = list(dict.fromkeys(map(_column, results)))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for result in results:
        values = (getattr(result, name) or "" for name in labels)
        row = tuple(" ".join(value) if isinstance(value, tuple) else value for value in values)
        mark = f" [{footnotes.index(result.note) + 1}]" if result.note in footnotes else ""
        rows.setdefault(row, {})[_column(result)] = result.printed + mark
    lines = [(*row, *(figures.get(column, "") for column in columns)) for row, figures in rows.items()]
    return _table([(*labels, *columns), *lines])


def _column(result: "PaperResult") -> str:
    shot = "" if result.metric == "parameters" else f" {result.n_shot}-shot"  # the name of the part has the shots
    return f"{result.metric}{shot} {result.unit}".rstrip()


def _training() -> str:
    from studies.reproduction.paper_results import paper_training, paper_training_notes

    runs = paper_training()
    values = [dict(setting.split("=") for setting in run.settings) for run in runs]
    rows = [("setting", *(run.recipe for run in runs))]
    rows += [(key, *(one[key] for one in values)) for key in values[0]]
    notes = "\n".join(map(_note, paper_training_notes()))
    return f"training: Hyper-parameters, by recipe\n\n{_table(rows)}\n\n{notes}"


def _table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns, with a narrower gap if the table is too wide."""
    wide = aligned(rows)
    return "\n".join(wide if max(map(len, wide)) <= WIDTH else aligned(rows, gap=" "))


def _note(text: str, mark: str = "-") -> str:
    return textwrap.fill(f"{mark} {text}", WIDTH, subsequent_indent=" " * (len(mark) + 1), break_on_hyphens=False)


if __name__ == "__main__":
    main(study)
