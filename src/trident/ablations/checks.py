"""Checks of values read from a grid's file: each gives back what it was given, or says in one line what is wrong."""

from collections.abc import Sequence
from typing import Any, cast

from trident.errors import TridentError
from trident.recipes import nearest, setting_types


def table(values: Any, where: str, needed: Sequence[str] = (), known: Sequence[str] | None = None) -> dict[str, Any]:
    """A table with the `needed` keys and, where any are given, none but these and the `known` ones."""
    if not isinstance(values, dict):
        raise TridentError(f"'{where}' is {values!r}: it must be a table")
    prefix = f"{where}." if where else ""
    for key in needed:
        if key not in values:
            raise TridentError(f"'{prefix}{key}' is missing")
    allowed = [*needed, *(known or ())]
    unknown = [key for key in values if allowed and key not in allowed]
    if unknown:
        raise TridentError(f"unknown key '{prefix}{unknown[0]}'{nearest(unknown[0], allowed)}")
    return cast(dict[str, Any], values)


def listed(values: Any, where: str) -> list[Any]:
    if not isinstance(values, list):
        raise TridentError(f"'{where}' is {values!r}: it must be a list")
    return values


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TridentError(f"'{where}' is {value!r}: it must be text")
    return value


def number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TridentError(f"'{where}' holds {value!r}: it must be a number")
    return float(value)


def known_setting(key: Any, where: str) -> str:
    """A setting under its full name, such as training.steps."""
    known = [name for name, _ in setting_types()]
    if key in known:
        return cast(str, key)
    short = [name for name in known if name.split(".")[1] == key]
    guess = f": write {' or '.join(short)}" if short else nearest(str(key), known)
    raise TridentError(f"unknown setting '{key}' in {where}{guess}")
