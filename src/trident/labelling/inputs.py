"""What the labelling commands read: labelled pictures, a pile, a saved classifier, corrections."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trident.errors import TridentError, errors_in, one_line
from trident.labelling.class_names import NONE, check_one_class_each, class_name
from trident.labelling.tables import COLUMN, MARK, mark_of, read_corrections

if TYPE_CHECKING:
    from trident.data.images import ImageFile, ImageSource

Say = Callable[[str], None]  # prints a line for the user


class Given(NamedTuple):
    """What the user gave."""

    by_class: "dict[str, list[ImageFile]]"  # the labelled pictures
    pile: "Sequence[ImageSource]"  # the pictures to label
    corrected: "dict[ImageSource, str]"  # those that a table corrects, with their right class
    unread: dict[str, str]  # an error message for each unreadable path among the labelled pictures
    unread_of_pile: dict[str, str]


def given_pictures(query: Path | None, support: Path | None, corrections: Path | None, say: Say) -> Given:
    by_class, unread = labelled_pictures(support, say) if support is not None else ({}, {})
    pile, more = pile_of(query, support, by_class, say) if query is not None else ([], {})
    corrected = corrected_pictures(corrections, pile, by_class, say)
    return Given(by_class, [source for source in pile if source not in corrected], corrected, unread, more)


def labelled_pictures(support: Path, say: Say) -> "tuple[dict[str, list[ImageFile]], dict[str, str]]":
    """The pictures of each class, and an error message for each unreadable path. Folders of one class are joined."""
    from trident.data.pictures import find_pictures
    from trident.data.readers import subfolders

    if not support.is_dir():
        raise TridentError(f"--support {support}: there is no such folder; it must hold one folder for each class")
    folders: dict[str, str] = {}
    by_class: dict[str, list[ImageFile]] = {}
    unread: dict[str, str] = {}
    for folder in subfolders(support):
        with errors_in(f"--support {support}"):
            name = class_name(folder.name)
        other = folders.setdefault(name.casefold(), folder.name)
        if other != folder.name:
            same = class_name(other) == name
            told = "are one class" if same else "are two classes: rename one if they should be one"
            say(f"{support}: the folders {other!a} and {folder.name!a} {told}")
        pictures, lines = find_pictures(folder)
        by_class.setdefault(name, []).extend(pictures)
        unread |= lines
    if not by_class:
        raise TridentError(f"--support {support} has no class folders: expected {support}/CLASS/PICTURE.jpg")
    empty = [name for name, files in by_class.items() if not files]
    if empty:
        why = f" ({next(iter(unread.values()))})" if unread else ""
        raise TridentError(f"--support {support}: class '{empty[0]}' has no pictures{why}")
    beside, _ = find_pictures(support, without=subfolders(support))
    if beside:
        why = f"it is not in a class folder: expected {support}/CLASS/{beside[0].file.name}"
        unread |= {str(source.file): f"{source.file}: {why}" for source in beside}
    return by_class, unread


def pile_of(
    query: Path, support: Path | None, by_class: "Mapping[str, Sequence[ImageSource]]", say: Say
) -> "tuple[Sequence[ImageSource], dict[str, str]]":
    """The pictures to label, and an error message for each unreadable path. Omits labelled pictures.

    Those are the pictures of the classes, whatever path leads to them, and those in `support`.
    """
    from trident.data.piles import apart_from, find_pile

    without = [support] if support is not None else []
    if support is not None and query.is_dir() and query.resolve().is_relative_to(support.resolve()):
        raise TridentError(f"--query {query} is inside --support {support}: choose another folder of pictures to label")
    with errors_in(f"--query {query}"):
        pile, unread = find_pile(query, without)
    pictures = apart_from(pile, [source for sources in by_class.values() for source in sources], without)
    omitted = len(pile) - len(pictures)
    if omitted and pictures:
        say(f"{omitted} pictures of the pile are labelled already, and left out")
    if not pictures:
        reasons = [f"all {omitted} are labelled already"] if omitted else list(unread.values())
        why = f" ({reasons[0]})" if reasons else ""
        raise TridentError(f"--query {query}: it has no picture to label{why}")
    return pictures, unread


def check_one_source(support: Path | None, model: Path | None) -> None:
    if support is None and model is None:
        raise TridentError("give the labelled pictures: --support DIR, or --model FILE of 'trident fit'")
    if support is not None and model is not None:
        raise TridentError("--support DIR and --model FILE exclude each other: give one of them")


def corrected_pictures(
    corrections: Path | None, pile: "Sequence[ImageSource]", by_class: "Mapping[str, Sequence[ImageSource]]", say: Say
) -> "dict[ImageSource, str]":
    """The pictures of the pile that a table corrects, with their right class.

    Says how many there are, and which of their classes are not in `by_class`, the labelled pictures. A saved classifier
    names new classes itself; `by_class` is empty then. A picture with two classes, `NONE` included, is an error.
    """
    right = {} if corrections is None else _read_corrected(corrections, pile, by_class, say)
    labelled = [*((one, name) for name, sources in by_class.items() for one in sources), *right.items()]
    check_one_class_each((mark_of(one) or one.name, name, one.name) for one, name in labelled)
    return right


def _read_corrected(
    corrections: Path, pile: "Sequence[ImageSource]", known: Collection[str], say: Say
) -> "dict[ImageSource, str]":
    classes, marks, columns, _ = read_corrections(corrections)
    by_path = {source.name: source for source in pile}
    missing = [path for path in classes if path not in by_path]
    # A path that is not UTF-8 was read with characters that cannot be written as such.
    unreadable = [path for path in missing if not path.isprintable()]
    if unreadable or (missing and len(missing) == len(classes)):
        advice = "save the table as UTF-8 (CSV UTF-8)" if unreadable else "give the same --query"
        raise TridentError(
            f"{corrections} corrects {[*unreadable, *missing][0]}, which is not in the pile: paths must be as "
            f"'trident predict' wrote them, so {advice}"
        )
    if missing:  # moved since, into the folder of a class for example
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        say(f"{corrections} corrects {missing[0]}{more}, not in the pile any more: left out")
    if not classes:
        column = f"write the right class into the column '{COLUMN}'; no other column is read"
        say(f"{corrections} has no corrections: {column}")
        return {}
    say_if_unchecked(corrections, columns, say)
    right = {by_path[path]: name for path, name in classes.items() if path in by_path}
    others = [path for path in marks if path in by_path and mark_of(by_path[path]) not in ("", marks[path])]
    if others:
        raise TridentError(
            f"{corrections} corrects another picture than {others[0]}, which is in the pile now ({len(others)} such "
            f"pictures): give the pile of that table; or, if its corrections are still right, clear its '{MARK}' cells"
        )
    new = new_classes(right.values(), known) if known else ""
    say(f"corrections taken from {corrections}: {len(right)}{new}")
    return right


def in_classes(given: Given) -> "dict[str, list[ImageSource]]":
    """The labelled and the corrected pictures of each class, without those of no class. New classes come last."""
    pictures: dict[str, list[ImageSource]] = {name: [*sources] for name, sources in given.by_class.items()}
    for source, name in given.corrected.items():
        if name != NONE:
            pictures.setdefault(name, []).append(source)
    return pictures


def say_if_unchecked(table: Path, columns: Collection[str], say: Say) -> None:
    if MARK not in columns:
        say(f"{table} has no column '{MARK}', so it cannot be checked that these are the same pictures")


def new_classes(names: Iterable[str], known: Iterable[str]) -> str:
    """Names those that are not known, for a message; and the most similar known one, if it may have been meant."""
    known = {*known, NONE}
    written = {name.casefold(): name for name in known}
    new = []
    for name in sorted(set(names) - known):
        close = difflib.get_close_matches(name.casefold(), written, n=1)
        new.append(one_line(name) + (f" (there is {one_line(written[close[0]])} too)" if close else ""))
    return f"; new classes: {', '.join(new)}" if new else ""
