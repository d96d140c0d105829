"""Labelling your own pictures: `trident predict`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import NotFiniteError, TridentError, one_line
from trident.labelling.corrections import mark_of
from trident.labelling.inputs import (
    check_cluster_and_backbone,
    check_one_source,
    corrected_pictures,
    in_classes,
    labelled_pictures,
    labeller_from_file,
    labeller_from_pictures,
    pile_of,
)
from trident.labelling.tables import Row, as_csv, as_json, check_kept, rows_of, write
from trident.learning.weights_header import check_run
from trident.methods.registry import check_method

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trident.data.images import ImageSource
    from trident.labelling.labelled import Labelled, PictureLabeller


@app.command(short_help="Label your own pictures.")
def predict(
    query: opt.Query,
    support: opt.Support = None,
    model: opt.Model = None,
    backbone: opt.Backbone = "auto",
    weights: opt.Weights = "auto",
    method: Annotated[
        str | None,
        typer.Option(
            help="Classify with this method of 'trident methods' instead of the default one. Methods that need no "
            "training take the features of --backbone; others use their included weights. Features of fewer than four "
            "pictures for each class are compared by logistic regression all the same.",
            show_default=False,
        ),
    ] = None,
    corrections: opt.Corrections = None,
    out: Annotated[Path | None, typer.Option(help="Write the table to this file: .csv or .json.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show all classes, not only the best two.")] = False,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Give no label below this probability; best_guess has it anyway.")
    ] = 0.0,
    least_sure_first: Annotated[
        bool, typer.Option("--least-sure-first", help="Sort the table: the pictures worth a look come first.")
    ] = False,
    cluster: opt.Cluster = None,
    no_cache: opt.NoCache = False,
    device: opt.Device = "auto",
    as_json_text: opt.Json = False,
) -> None:
    """Label pictures from a few labelled examples, and print a CSV table of path, label and probability.

    Pictures may have any size: the middle square is scaled to the network's input size. The whole pile is classified
    together, and pictures that belong to none of the classes get no label. Features are kept on disk, so that a
    stopped command goes on where it was, and the next one is fast. With --weights, pictures are classified together in
    chunks of up to 100, and nothing is kept. Unreadable pictures are skipped and named on standard error; the exit code
    is then 2.

    'trident sort' copies or moves the pictures into a folder for each class, as the table says.

    With --cluster, the nodes of a Ray cluster compute the features, and the labels are the same. All nodes must see
    the pictures at the same paths.
    """
    from trident.cli.console import say
    from trident.data.decoding_process import decoders
    from trident.data.images import silence_pillow
    from trident.files import check_writable

    silence_pillow()
    check_one_source(support, model)
    if model is not None and weights != "auto":
        raise TridentError("--model and --weights exclude each other: a classifier has its own network")
    if out is not None and out.suffix.lower() not in (".csv", ".json"):
        raise TridentError(f"--out {out}: the file must end in .csv or .json")
    if as_json_text and out is not None and out.suffix.lower() == ".csv":
        raise TridentError("--json goes to standard output: omit it, or give --out a file that ends in .json")
    if weights != "auto":
        check_run(Path(weights))
    if method is not None:
        check_method(method)
    if method is not None and (model is not None or weights != "auto"):
        raise TridentError("--method excludes --model and --weights: they have a method already")
    if out is not None:
        check_writable(out)
    if cluster is not None:
        check_cluster_and_backbone(cluster, backbone, weights, model)
    unread: dict[str, str] = {}
    by_class: dict[str, Sequence[ImageSource]] = {}
    if support is not None:
        found, unread = labelled_pictures(support, say)
        by_class.update(found)
    pile, more = pile_of(query, support, by_class, say)
    unread |= more
    corrected = corrected_pictures(corrections, pile, by_class, say)
    known = {source.name: (name, mark_of(source)) for source, name in corrected.items()} if out is not None else {}
    check_kept(out, known)
    pile = [source for source in pile if source not in corrected]
    decoders.start()  # while torch is imported
    if model is not None:
        right = in_classes(corrected)
        labeller: PictureLabeller = labeller_from_file(model, backbone, opt.device_of(device), not no_cache, say, right)
    else:
        everything = in_classes(corrected, by_class)
        labeller = labeller_from_pictures(
            everything, backbone, weights, opt.device_of(device), not no_cache, say, method
        )
    _check_network(labeller, method, cluster)
    try:
        labelled = _labelled(labeller, pile, cluster)
    except NotFiniteError as error:
        network = model or (weights if weights != "auto" else labeller.describe())
        raise NotFiniteError(f"{network}: {error}") from error
    skipped = {pile[place].name: why for place, why in labelled.failures.items()} | unread
    rows = rows_of(labelled, pile, corrected, threshold, least_sure_first)
    check_kept(out, known)  # it may have been corrected in the meantime
    if out.suffix.lower() == ".json" if out is not None else as_json_text:
        write(as_json(rows, labelled.classes, every, skipped), out)
    else:
        on_terminal = out is None and sys.stdout.isatty()
        write(as_csv(rows, labelled.classes, every, one_line if on_terminal else str), out)
    if out is not None:
        say(_summary(rows, len(pile) + len(corrected), out))
    for why in skipped.values():
        print(f"trident: skipped {one_line(why)}", file=sys.stderr)
    if skipped:
        raise typer.Exit(2)


def _check_network(labeller: "PictureLabeller", method: str | None, cluster: str | None) -> None:
    """A method with its own small network cannot use a cluster, and labels worse than pretrained features do."""
    from trident.cli.console import say
    from trident.labelling.labeller import Labeller

    if not isinstance(labeller, Labeller):
        return
    if cluster is not None:
        raise TridentError(
            f"--cluster computes features of a backbone, but {method} brings its own network: omit one of them"
        )
    if method is not None:
        text = f"{method} brings its own small network, trained on miniImageNet"
        say(f"{text}: pretrained features give more right labels")


def _labelled(labeller: "PictureLabeller", pile: "Sequence[ImageSource]", cluster: str | None) -> "Labelled":
    from trident.cli.console import counting, say

    try:
        with counting("labelling pictures") as progress:
            if cluster is None:
                return labeller.label(pile, progress)
            from trident.labelling.cluster_features import label_on_cluster
            from trident.labelling.feature_labeller import FeatureLabeller

            assert isinstance(labeller, FeatureLabeller)  # the only kind without conv4
            return label_on_cluster(labeller, pile, cluster, lambda text: say(text), progress)
    except KeyboardInterrupt:
        kept = labeller.keeps_features
        print(f"trident: stopped{'; the same command goes on where it stopped' if kept else ''}", file=sys.stderr)
        raise typer.Exit(130) from None


def _summary(rows: list[Row], n_pictures: int, out: Path) -> str:
    text = f"labelled {sum(bool(row.label) for row in rows)} of {n_pictures} pictures, see {out}"
    none = sum(row.none_of_these for row in rows)
    return text + (f"; none of these classes: {none}" if none else "")
