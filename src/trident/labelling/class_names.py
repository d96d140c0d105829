"""What a class may be called, wherever its name comes from: folders, tables, notebooks, saved classifiers, the page."""

import unicodedata
from collections.abc import Iterable

from trident.errors import BadValueError, is_shown, one_line

NONE = "none of these"  # in place of a class: the picture belongs to no class
LONGEST_NAME = 200  # characters


def is_none(name: str) -> bool:
    """Whether a name means no class: in capital letters too, or as the column is called, none_of_these."""
    return " ".join(name.casefold().replace("_", " ").split()) == NONE


def class_name(text: str) -> str:
    """The name as it is used, with single spaces and composed characters (NFC): texts that look alike are one class."""
    name = " ".join(unicodedata.normalize("NFC", text).split())
    if is_none(name):
        raise BadValueError(f"a class cannot be called '{name}', which means no class at all")
    if not 0 < len(name) <= LONGEST_NAME or not is_shown(name):
        rule = f"it must have 1 to {LONGEST_NAME} characters of UTF-8, without control characters"
        raise BadValueError(f"a class cannot be called '{one_line(name[:LONGEST_NAME])}': {rule}")
    return name


def check_one_class_each(pictures: Iterable[tuple[object, str, str]]) -> None:
    """Pictures as (key of the content, class, name): the same picture in two classes is a mistake."""
    seen: dict[object, tuple[str, str]] = {}
    for key, label, name in pictures:
        other_label, other = seen.setdefault(key, (label, name))
        if other_label != label:
            raise BadValueError(
                f"{other} in class '{other_label}' and {name} in class '{label}' are the same picture: keep one of them"
            )
