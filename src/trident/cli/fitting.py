"""Classifiers to keep, and what to label next: `trident fit` and `trident suggest`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.errors import TridentError, one_line
from trident.labelling.inputs import (
    check_one_source,
    corrected_pictures,
    in_classes,
    labelled_pictures,
    labeller_from_file,
    labeller_from_pictures,
    pile_of,
)


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
    from trident.labelling.saved import SUFFIX, save_classifier

    silence_pillow()
    if out.suffix != SUFFIX:
        raise TridentError(f"--out {out}: the file must end in {SUFFIX}")
    if (corrections is None) != (query is None):
        raise TridentError("--corrections TABLE and --query PILE belong together: give both, or neither")
    check_writable(out)
    found, unread = labelled_pictures(support, say)
    if unread:
        raise TridentError(next(iter(unread.values())))
    pile = pile_of(query, support, found, say)[0] if query is not None else []
    by_class = in_classes(corrected_pictures(corrections, pile, found, say), found)
    labeller = labeller_from_pictures(by_class, backbone, "auto", opt.device_of(device), not no_cache, say)
    if not isinstance(labeller, FeatureLabeller):
        raise TridentError("a saved classifier needs features that are the same in every pile: omit --backbone conv4")
    save_classifier(labeller, out)
    n_pictures = sum(map(len, by_class.values()))
    say(f"wrote {out}: {len(by_class)} classes from {n_pictures} pictures")


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
    from trident.cli.console import counting, say
    from trident.data.images import silence_pillow
    from trident.labelling.feature_labeller import FeatureLabeller
    from trident.labelling.labelled import PictureLabeller
    from trident.labelling.picture_features import features_of
    from trident.labelling.suggesting import suggest as choose
    from trident.labelling.typicality import normalised

    silence_pillow()
    check_one_source(support, model)
    by_class, unread = labelled_pictures(support, say) if support is not None else ({}, {})
    pile, more = pile_of(query, support, by_class, say)
    corrected = corrected_pictures(corrections, pile, by_class, say)
    pile = [source for source in pile if source not in corrected]
    if not pile:
        raise TridentError(f"{corrections} corrects every picture of --query {query}: there is none left to suggest")
    if model is not None:
        right = in_classes(corrected)
        labeller: PictureLabeller = labeller_from_file(model, backbone, opt.device_of(device), not no_cache, say, right)
    else:
        everything = in_classes(corrected, by_class)
        labeller = labeller_from_pictures(everything, backbone, "auto", opt.device_of(device), not no_cache, say)
    if not isinstance(labeller, FeatureLabeller):
        raise TridentError("suggestions need features that are the same in every pile: omit --backbone conv4")
    with counting("looking at pictures") as progress:
        features, failures = features_of(labeller.backbone, pile, labeller.cache, progress)
    readable = [place for place in range(len(pile)) if place not in failures]
    features = normalised(features[readable])
    labelled = labeller.label_features(features)
    chosen = choose(labeller.unit_features, features, labelled, number)
    found = [(pile[readable[place]].name, *labelled.ranking(place)[0]) for place in chosen]
    if as_json:
        print(json.dumps([{"path": path, "best_guess": label, "probability": p} for path, label, p in found]))
    else:
        for path, label, p in found:
            print(f"{one_line(path)}\tperhaps {one_line(label)} ({p:.2f})")
    skipped = [*failures.values(), *unread.values(), *more.values()]
    for why in skipped:
        print(f"trident: skipped {one_line(why)}", file=sys.stderr)
    if skipped:
        raise typer.Exit(2)
