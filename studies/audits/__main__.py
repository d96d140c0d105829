"""Audit all installed weights: `python -m studies.audits FOLDER STORE... [--name NAME]... [--device cuda]`.

Each is measured on the test classes of the dataset that it was trained on; the glyphs need no store. The results go to
a file in FOLDER, a line for each; what is there is not measured again, so that several processes can share the work.
Without stores and names, they are printed as one document.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from trident.cli.app import main
from trident.cli.options import Device, device_of
from trident.data.glyphs import open_glyphs
from trident.data.store import open_store
from trident.grids.tables import markdown_table
from trident.learning.checkpoint import load_checkpoint
from trident.learning.frozen_weights import with_conv4
from trident.measuring.audit import PROTOCOLS, audit
from trident.measuring.record import FILE_NAME, change_line, plus_minus, read_lines
from trident.settings import require
from trident.weights import weight_names

COLUMNS = {
    "class-sorted queries": "sorted by class",
    "Dirichlet(2) class counts": "Dirichlet(2) counts",
    "one query at a time": "one at a time",
    "transductive batch norm": "batch norm of the task",
    "support batch norm": "of the support set",
    "running batch norm": "of training",
    "one latent sample": "one latent sample",
    "average of 10 samples": "mean of 10 samples",
    "as the paper": "sorted, one sample",
}
FORMER_NAMES = {"cub200": "cub"}  # of datasets, in weights that were trained before the change
INTRODUCTION = """\
# Audits of the included weights

How much the accuracy of each weights file depends on its protocol. `trident evaluate NAME --also audit --data STORE
--split test --tasks {tasks}` audits one, `python -m studies.audits FOLDER STORE...` all that are installed. The
weights of metaqda, sib, ssr and logistic-softmax-gp take the features of another weights file: the audit leaves the
rows of batch norm out for them, and this tool joins the two files.

- **Accuracy** is measured under the default protocol: test classes of the dataset that the weights were trained on,
  shuffled queries, balanced, all queries at once, the weights' own batch norm, latent means, {tasks} tasks, 95 %
  interval, seed 0. The headings give ways, shots and queries per class.
- **The other columns** change one thing about this protocol (the last one two things), on the same tasks, and give
  the paired difference in points. [`measuring.md`](measuring.md) explains each.
- **The networks** are Conv4, trained on the dataset of the heading alone. `features-trident` is an exception: it takes
  features of an EfficientNet-Lite0 that was trained on ImageNet, and its STORE is one made with `--features`.
- **A dash** means that the change does not apply. *No result* means that inner steps diverge, or that the method needs
  all queries of a task at once.
"""


study = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@study.command()
def audits(
    folder: Annotated[Path, typer.Argument(help="Folder of the results.")],
    given: Annotated[list[Path] | None, typer.Argument(metavar="[STORE]...", help="Datasets to measure on.")] = None,
    names: Annotated[list[str] | None, typer.Option("--name", help="Only these weights.")] = None,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks under each protocol.")] = 100,
    device: Device = "auto",
) -> None:
    """Audit all installed weights on test classes, or without stores and names print the results as one document."""
    assert list(COLUMNS) == list(PROTOCOLS)[1:]
    if not given and not names:
        print(document(folder), end="")
        return
    stores = {store.dataset: store for store in [open_glyphs(), *map(open_store, given or [])]}
    for name in names or weight_names():
        model = with_conv4(load_checkpoint(name))
        dataset = str(model.provenance["dataset"])
        dataset = FORMER_NAMES.get(dataset, dataset)
        if name in read_lines(folder / FILE_NAME) or dataset not in stores:
            continue
        found = audit(model, stores[dataset], split="test", tasks=tasks, seed=0, device=device_of(device))
        result = {"dataset": dataset, "episode": model.recipe.episode.describe()} | found.to_json()
        change_line(folder / FILE_NAME, name, lambda _, result=result: result)  # type: ignore[misc]
        print(f"{name}: {found.verdict()}", flush=True)


def document(folder: Path) -> str:
    """A table for each dataset and kind of task."""
    results = read_lines(folder / FILE_NAME)
    results = {name: results[name] for name in sorted(results, key=lambda name: f"{name}.")}  # as files are listed
    tasks = {row["protocol"]["tasks"] for result in results.values() for row in result["rows"]}
    require(bool(tasks), f"{folder} holds no audits: give the stores to measure on")
    require(len(tasks) == 1, f"the audits in {folder} are of {tasks} tasks: one document needs one number")
    lines = [INTRODUCTION.format(tasks=tasks.pop())]
    for group in sorted({heading_of(result) for result in results.values()}):
        members = {name: one for name, one in results.items() if heading_of(one) == group}
        used = [name for name in COLUMNS if any(cell(one, name) != "-" for one in members.values())]
        rows = [["weights", "accuracy, %", *(COLUMNS[name] for name in used)]]
        for name, one in members.items():
            first = one["rows"][0]
            accuracy = plus_minus(first["accuracy"], first["ci95"])
            rows.append([name, accuracy, *(cell(one, column) for column in used)])
        lines += [f"## {group}\n", *markdown_table(rows), ""]
    depends = [name for name, one in results.items() if one["depends_on_query_order"]]
    listed = f": {', '.join(depends)}" if depends else ""
    lines.append(f"Accuracy depends on the order of the queries in {len(depends)} of {len(results)}{listed}.\n")
    missing = [name for name in weight_names() if name not in results]
    if missing:
        lines.append(f"Not audited yet: {', '.join(missing)}.\n")
    return "\n".join(lines)


def heading_of(result: dict[str, Any]) -> str:
    return f"{result['dataset']}, {result['episode']}, {result['rows'][0]['protocol']['n_query']} queries per class"


def cell(result: dict[str, Any], name: str) -> str:
    if name in result["without_result"]:
        return "no result"
    row = next((row for row in result["rows"] if row["name"] == name), None)
    return plus_minus(round(row["difference"], 2) + 0.0, row["difference_ci95"], sign="+") if row else "-"


if __name__ == "__main__":
    main(study)
