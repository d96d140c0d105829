"""What the labelling commands read: labelled pictures, a pile, a saved classifier, corrections."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trident.errors import TridentError, errors_in, one_line
from trident.labelling.corrections import NONE

if TYPE_CHECKING:
    from trident.data.images import ImageFile, ImageSource
    from trident.labelling.feature_cache import FeatureCache
    from trident.labelling.feature_labeller import FeatureLabeller
    from trident.labelling.labelled import PictureLabeller

Support = Annotated[
    Path | None, typer.Option(help="Labelled pictures: a folder with one folder for each class.", show_default=False)
]
Query = Annotated[
    Path,
    typer.Option(
        help="The pictures to label: a folder, including its subfolders; a text file with one path on each line; or a "
        "folder of tar archives (WebDataset) or of Parquet files."
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="auto|ADDRESS",
        help="Compute features on a Ray cluster: HOST:PORT of its head node; auto: the one that runs here, or else "
        "a new one of this machine alone.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="For conv4: a name from 'trident weights', a run or a file; auto: by the number of labelled pictures."
    ),
]
Backbone = Annotated[
    str,
    typer.Option(
        help="Network that looks at the pictures; 'trident backbones' lists them. auto: efficientnet-lite0 if it is "
        "installed, otherwise conv4."
    ),
]
Model = Annotated[
    Path | None, typer.Option(help="A classifier that 'trident fit' wrote, instead of --support.", show_default=False)
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Do not keep features on disk; a stopped command then starts anew.")
]


def labelled_pictures(support: Path) -> "tuple[dict[str, list[ImageFile]], dict[str, str]]":
    """The pictures of each class, and an error message for each unreadable path."""
    from trident.data.pictures import find_pictures
    from trident.data.readers import subfolders

    if not support.is_dir():
        raise TridentError(f"--support {support}: there is no such folder; it must hold one folder for each class")
    found = {folder.name: find_pictures(folder) for folder in subfolders(support)}
    for name in found:
        if name.casefold() == NONE:
            raise TridentError(f"--support {support}: a class cannot be called '{name}', which means no class at all")
    if not found:
        raise TridentError(f"--support {support} has no class folders: expected {support}/CLASS/PICTURE.jpg")
    by_class = {name: pictures for name, (pictures, _) in found.items()}
    unread = {path: line for _, lines in found.values() for path, line in lines.items()}
    empty = [name for name, files in by_class.items() if not files]
    if empty:
        why = f" ({next(iter(unread.values()))})" if unread else ""
        raise TridentError(f"--support {support}: class '{empty[0]}' has no pictures{why}")
    beside, _ = find_pictures(support, without=subfolders(support))
    if beside:
        why = f"it is not in a class folder: expected {support}/CLASS/{beside[0].path.name}"
        unread |= {str(source.path): f"{source.path}: {why}" for source in beside}
    return by_class, unread


def pile_of(
    query: Path, support: Path | None, without: list[Path], by_class: "Mapping[str, Sequence[ImageSource]]"
) -> "tuple[Sequence[ImageSource], dict[str, str]]":
    """The pictures to label, and an error message for each unreadable path. Omits labelled and sorted pictures.

    Those are the pictures of the classes, whatever path leads to them, and those in the folders `without`.
    """
    from trident.cli.console import stderr
    from trident.data.piles import apart_from, find_pile

    if support is not None and query.is_dir() and query.resolve().is_relative_to(support.resolve()):
        raise TridentError(f"--query {query} is inside --support {support}: choose another folder of pictures to label")
    with errors_in(f"--query {query}"):
        found, unread = find_pile(query, without)
    pictures = apart_from(found, [source for sources in by_class.values() for source in sources], without)
    omitted = len(found) - len(pictures)
    if omitted and pictures:
        stderr.print(f"{omitted} pictures of the pile are labelled or sorted already, and left out", soft_wrap=True)
    if not pictures:
        reasons = [f"all {omitted} are labelled or sorted already"] if omitted else list(unread.values())
        why = f" ({reasons[0]})" if reasons else ""
        raise TridentError(f"--query {query}: it has no picture to label{why}")
    return pictures, unread


def labeller_from_pictures(
    by_class: "Mapping[str, Sequence[ImageSource]]",
    backbone: str,
    weights: str,
    device: str,
    use_cache: bool,
    method: str | None = None,
) -> "PictureLabeller":
    """Makes the labeller and says on standard error what it is, and what would be better."""
    from trident.cli.console import stderr

    if method is not None:
        from trident.labelling.by_method import labeller_by_method

        labeller = labeller_by_method(by_class, method, backbone, device, opened_cache(use_cache))
        stderr.print(labeller.describe(), soft_wrap=True)
        if not labeller.calibrated:
            stderr.print("its probabilities are not calibrated: they may be too sure, or not sure enough")
        return labeller
    from trident.labelling.making import CONV4, HINT, chosen_backbone, make_labeller
    from trident.weights import weights_for

    chosen = chosen_backbone(backbone, weights)
    cache = opened_cache(use_cache and chosen != CONV4)
    labeller = make_labeller(by_class, chosen, weights, device, cache)
    if chosen != CONV4:
        stderr.print(labeller.describe(), soft_wrap=True)
        return labeller
    auto = weights_for(sum(map(len, by_class.values())), len(by_class))
    name = Path(auto if weights == "auto" else weights).stem
    stderr.print(f"weights: {name}, {labeller.describe()}", soft_wrap=True)
    if backbone == "auto" and weights == "auto":
        stderr.print(HINT, soft_wrap=True)
    return labeller


def labeller_from_file(
    model: Path, backbone: str, device: str, use_cache: bool, more: "Mapping[str, Sequence[ImageSource]]"
) -> "FeatureLabeller":
    """A saved classifier, with more labelled pictures."""
    from trident.cli.console import stderr
    from trident.labelling.saved import load_classifier

    if backbone == "conv4":
        raise TridentError("--backbone conv4: a saved classifier needs the backbone that it was made with: omit it")
    labeller = load_classifier(model, device, None if backbone == "auto" else backbone, opened_cache(use_cache))
    new = new_classes(more, labeller.classes)
    labeller = labeller.with_pictures(more)
    text = f"{model}: {labeller.describe()}, {len(labeller.classes)} classes{new}"
    stderr.print(text, soft_wrap=True, markup=False)
    return labeller


def new_classes(names: Iterable[str], known: Iterable[str]) -> str:
    """Names those that are not known, for a message; and the most similar known one, if it may have been meant."""
    written = {name.casefold(): name for name in known}
    found = []
    for name in sorted(set(names) - set(written.values()) - {NONE}):
        close = difflib.get_close_matches(name.casefold(), written, n=1)
        found.append(one_line(name) + (f" (there is {one_line(written[close[0]])} too)" if close else ""))
    return f"; new classes: {', '.join(found)}" if found else ""


def opened_cache(wanted: bool) -> "FeatureCache | None":
    """The feature cache; a cache that cannot be used is reported, and work goes on without it."""
    from trident.cli.console import stderr
    from trident.labelling.making import open_cache

    cache = open_cache(wanted)
    if cache is not None and cache.problem is not None:
        stderr.print(f"trident: features are not kept: {cache.problem}", soft_wrap=True)
    return cache
