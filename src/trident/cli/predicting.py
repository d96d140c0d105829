"""Labelling your own pictures: `trident predict`, `sort`, `fit` and `suggest`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import NotFiniteError, TridentError, one_line
from trident.labelling.inputs import check_one_source, given_pictures, say_if_unchecked
from trident.labelling.tables import as_csv, as_json, check_kept, mark_of, rows_of, write
from trident.learning.weights_header import check_run
from trident.methods.registry import check_method

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trident.data.images import ImageSource
    from trident.labelling.labelled import Labelled
    from trident.labelling.making import PictureLabeller


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
            "training take the features of --backbone; others use their included weights. Piles of fewer than four "
            "pictures for each class are too small for a method: their pictures are classified as by default.",
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
    if cluster is not None:  # before any work: Ray is there, a cluster answers, and there are features to compute
        from trident.labelling.making import CONV4, chosen_backbone
        from trident.ray_cluster import check_cluster

        if model is None and chosen_backbone(backbone, weights) == CONV4:
            raise TridentError(
                "--cluster computes features, and conv4 has none that are the same in every pile: omit it"
            )
        check_cluster(cluster)
    given = given_pictures(query, support, corrections, say)
    pile, corrected = given.pile, given.corrected
    known = {source.name: (name, mark_of(source)) for source, name in corrected.items()} if out is not None else {}
    check_kept(out, known)
    decoders.start()  # while torch is imported
    from trident.labelling.making import labeller_from

    labeller = labeller_from(given, model, backbone, weights, opt.device_of(device), not no_cache, say, method)
    try:
        labelled = _labelled(labeller, pile, method, cluster)
    except NotFiniteError as error:
        network = model or (weights if weights != "auto" else labeller.describe())
        raise NotFiniteError(f"{network}: {error}") from error
    skipped = {pile[place].name: why for place, why in labelled.failures.items()} | given.unread | given.unread_of_pile
    rows = rows_of(labelled, pile, corrected, threshold, least_sure_first)
    check_kept(out, known)  # it may have been corrected in the meantime
    if out.suffix.lower() == ".json" if out is not None else as_json_text:
        write(as_json(rows, labelled.classes, every, skipped), out)
    else:
        on_terminal = out is None and sys.stdout.isatty()
        write(as_csv(rows, labelled.classes, every, one_line if on_terminal else str), out)
    if out is not None:
        none = sum(row.none_of_these for row in rows)
        labelled_rows = f"labelled {sum(bool(row.label) for row in rows)} of {len(pile) + len(corrected)} pictures"
        say(f"{labelled_rows}, see {out}" + (f"; none of these classes: {none}" if none else ""))
    if labelled.expected is not None:
        say(labelled.expected.describe())
    _end(f"skipped {why}" for why in skipped.values())


def _labelled(
    labeller: "PictureLabeller", pile: "Sequence[ImageSource]", method: str | None, cluster: str | None
) -> "Labelled":
    from trident.cli.console import Counter, say
    from trident.labelling.cluster_features import label_on_cluster
    from trident.labelling.labeller import Labeller

    if isinstance(labeller, Labeller):
        if cluster is not None:
            raise TridentError(
                f"--cluster computes features of a backbone, but {method} brings its own network: omit one of them"
            )
        if method is not None:
            text = f"{method} brings its own small network, trained on miniImageNet"
            say(f"{text}: pretrained features give more right labels")
        with opt.stoppable(lambda: False), Counter("labelling pictures") as progress:
            return labeller.label(pile, progress)
    with opt.stoppable(lambda: labeller.keeps_features), Counter("labelling pictures") as progress:
        if cluster is None:
            return labeller.label(pile, progress)
        return label_on_cluster(labeller, pile, cluster, say, progress)


def _end(problems: "Iterable[str]") -> None:
    """Print what could not be done. If there is anything, the exit code is 2."""
    lines = [f"trident: {one_line(problem)}" for problem in problems]
    if lines:
        print("\n".join(lines), file=sys.stderr)
        raise typer.Exit(2)


@app.command(short_help="Copy or move labelled pictures into a folder for each class.")
def sort(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="What 'trident predict --out' wrote: .csv or .json.")],
    target: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder for the class folders.")],
    move: Annotated[bool, typer.Option("--move", help="Move the pictures instead of copying them.")] = False,
    really: Annotated[
        bool, typer.Option("--yes", help="Really copy or move; without it, only print what would be done.")
    ] = False,
    add: Annotated[
        bool,
        typer.Option("--add", help="Also into class folders that hold other files, such as those of another pile."),
    ] = False,
) -> None:
    """Copy labelled pictures into DIR/CLASS, or move them there.

    The class is the label, or what you wrote into the column 'correction'. Pictures with neither, or of 'none of
    these', stay where they are. Run it in the folder in which 'trident predict' ran.

    No file is ever overwritten: where a name is taken, the picture gets a number. A picture that has changed since it
    was labelled is not sorted. After Ctrl-C or a kill, the same command does the rest.
    """
    from trident.cli.console import Counter, say
    from trident.labelling.sorting import carry_out, pictures_to_sort, plan, strangers
    from trident.labelling.tables import read_corrections

    say_if_unchecked(table, read_corrections(table).columns, say)
    with Counter("looking at pictures") as progress:
        pictures = pictures_to_sort(table, target, move, progress)
    labels = pictures.labels
    if not labels and not pictures.there and pictures.problems:
        raise TridentError(
            f"no picture of {table} can be sorted ({pictures.problems[0]}): run it where 'trident predict' ran; "
            "pictures must be files, not inside an archive"
        )
    steps = plan(labels, target, move)
    others = strangers(table, steps)
    if others and not add:
        raise TridentError(
            f"{others[0]} is not in {table}: sort into another folder if it was labelled by hand, for sorted pictures "
            "would count as labelled by hand too; --add sorts among such files"
        )
    if pictures.left:
        left = f"{len(pictures.left)}, the first is {pictures.left[0]}"
        say(f"sorted under another label than now: {left}; they stay there")
    before = len(labels) - len(steps) + len(pictures.there)
    there = f"; {before} were there already" if before else ""
    verb = "move" if move else "copy"
    problems = pictures.problems
    if really:
        with Counter("sorting pictures") as progress:
            done, failures = carry_out(steps, target, move, progress)
        problems = problems + failures
        number = f"{done} of {len(steps)}" if failures else f"{done}"
        say(f"{verb.replace('y', 'ie')}d {number} pictures into {target}{there}")
    else:
        for source, place in steps:
            say(f"would {verb} {source} to {place}")
        say(f"nothing was done; --yes would {verb} {len(steps)} pictures{there}")
    _end(problems)


@app.command(short_help="Save a classifier made from labelled pictures.")
def fit(
    support: Annotated[Path, typer.Option(help="Labelled pictures: a folder with one folder for each class.")],
    out: Annotated[Path, typer.Option(help="The file to write; it must end in .trident.")],
    corrections: opt.Corrections = None,
    query: Annotated[
        Path | None, typer.Option(help="The pile whose labels --corrections corrects.", show_default=False)
    ] = None,
    backbone: opt.Backbone = "auto",
    no_cache: opt.NoCache = False,
    device: opt.Device = "auto",
) -> None:
    """Save a classifier, for 'trident predict --model'. The file holds features and labels, but no pictures.

    With --corrections and --query, the corrected pictures of a pile count as labelled ones; the file does not remember
    which pictures belong to none of the classes. Whoever uses the file needs the same backbone.
    """
    from trident.cli.console import say
    from trident.data.images import silence_pillow
    from trident.files import check_writable
    from trident.labelling.feature_labeller import FeatureLabeller
    from trident.labelling.making import labeller_from
    from trident.labelling.saved import SUFFIX, save_classifier

    silence_pillow()
    if out.suffix != SUFFIX:
        raise TridentError(f"--out {out}: the file must end in {SUFFIX}")
    if (corrections is None) != (query is None):
        raise TridentError("--corrections TABLE and --query PILE belong together: give both, or neither")
    check_writable(out)
    given = given_pictures(query, support, corrections, say)
    if given.unread:
        raise TridentError(next(iter(given.unread.values())))
    labeller = labeller_from(given, None, backbone, "auto", opt.device_of(device), not no_cache, say)
    if not isinstance(labeller, FeatureLabeller):
        raise TridentError("a saved classifier needs features that are the same in every pile: omit --backbone conv4")
    save_classifier(labeller, out)
    say(f"wrote {out}: {len(labeller.classes)} classes from {len(labeller.labels)} pictures")


@app.command(short_help="Say which pictures to label next.")
def suggest(
    query: opt.Query,
    support: opt.Support = None,
    model: opt.Model = None,
    corrections: opt.Corrections = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many pictures to suggest.")] = 10,
    backbone: opt.Backbone = "auto",
    no_cache: opt.NoCache = False,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Print the pictures of a pile whose labels would help most: uncertain, and different from each other.

    Put them into the class folders of --support; or write their class into the column 'correction' of a table that
    'trident predict' wrote, and give it with --corrections. Then label the pile again.
    """
    from trident.cli.console import Counter, say
    from trident.data.images import silence_pillow
    from trident.labelling.feature_labeller import FeatureLabeller
    from trident.labelling.making import labeller_from
    from trident.labelling.picture_features import features_of
    from trident.labelling.suggesting import suggest as choose
    from trident.labelling.typicality import normalised

    silence_pillow()
    check_one_source(support, model)
    given = given_pictures(query, support, corrections, say)
    if not given.pile:
        raise TridentError(f"{corrections} corrects every picture of --query {query}: there is none left to suggest")
    labeller = labeller_from(given, model, backbone, "auto", opt.device_of(device), not no_cache, say)
    if not isinstance(labeller, FeatureLabeller):
        raise TridentError("suggestions need features that are the same in every pile: omit --backbone conv4")
    with Counter("looking at pictures") as progress:
        features, failures = features_of(labeller.backbone, given.pile, labeller.cache, progress)
    readable = [place for place in range(len(given.pile)) if place not in failures]
    features = normalised(features[readable])
    labelled = labeller.label_features(features)
    chosen = choose(labeller.unit_features, features, labelled, number)
    suggested = [(given.pile[readable[place]].name, *labelled.ranking(place)[0]) for place in chosen]
    if as_json:
        opt.print_json([{"path": path, "best_guess": label, "probability": p} for path, label, p in suggested])
    else:
        for path, label, p in suggested:
            print(f"{one_line(path)}\tperhaps {one_line(label)} ({p:.2f})")
    if labelled.expected is not None:
        say(labelled.expected.describe("the pile's labels"))
    _end(f"skipped {why}" for why in [*failures.values(), *given.unread.values(), *given.unread_of_pile.values()])
