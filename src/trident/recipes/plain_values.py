"""From the plain values of TOML and JSON to checked dataclasses. Nothing here imports torch."""

import dataclasses
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Any

from trident.errors import TridentError, did_you_mean, is_shown
from trident.settings import LARGEST, check_largest, hints_of, require

MOST_CHARACTERS = 1000  # of a setting that is text
Choose = Callable[[Any, dict[str, Any], str], tuple[Any, dict[str, Any]]]  # the same arguments, without the last
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a table"}
_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = 200


def short(value: Any) -> str:
    """A value in a message: in quotes, and shortened, because it can be long or deeply nested."""
    try:
        return _SHORTENED.repr(value)
    except ValueError:  # Python does not write out numbers of thousands of digits
        return "too long a number"


def checked(kind: Any, value: Any, where: str = "", choose: Choose | None = None) -> Any:
    """A value converted to the type `kind`, often a dataclass. Errors name the key, which begins with `where`.

    `choose`: for settings, whose texts are bounded and may say 'none'. It is called with a dataclass, the values for it
    and their key, and returns the class that is really meant, and the values for that.
    """
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):  # all unions are "something or None"
        no_value = value is None or (choose is not None and value == "none")
        return None if no_value else checked(inner[0], value, where, choose)
    if origin is typing.Literal:
        require(value in inner, f"{where} is {short(value)}: it must be one of {', '.join(inner)}")
        return value
    if isinstance(value, int) and abs(value) >= 2**63:
        raise TridentError(f"{where} is too large a number: it must be below 2**63")
    if kind is float and type(value) is int:
        return float(value)
    if dataclasses.is_dataclass(kind):
        return _made(kind, value, where, choose)
    plain: Any = list if origin is tuple else origin
    require(type(value) is plain, f"{where or 'it'} is {short(value)}: it must be {_NAMES[plain]}")
    if plain is list:
        return origin(checked(inner[0], entry, f"{where}[{place}]", choose) for place, entry in enumerate(value))
    if plain is dict:
        under = f"{where}." if where else ""
        return {key: checked(inner[1], entry, under + key, choose) for key, entry in value.items()}
    if plain is str and choose is not None:
        printable = f"{where} is {short(value)}: it must be text of at most {MOST_CHARACTERS} printable characters"
        require(len(value) <= MOST_CHARACTERS and is_shown(value), printable)
    return value


def _made(kind: Any, values: Any, where: str, choose: Choose | None) -> Any:
    """A dataclass from a table."""
    noun = "key" if choose is None else "setting"
    require(type(values) is dict, f"'{where or 'it'}' must be a table of {noun}s, not {short(values)}")
    kind, values = choose(kind, values, where) if choose else (kind, values)
    under, fields = f"{where}." if where else "", dataclasses.fields(kind)
    hints = {entry.name: hints_of(kind)[entry.name] for entry in fields}
    for key in values:
        require(key in hints, f"unknown {noun} {short(under + key)}{did_you_mean(key, list(hints))}")
    for entry in fields:
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        require(not needed or entry.name in values, f"'{under}{entry.name}' is missing")
    made = kind(**{key: checked(hints[key], value, under + key, choose) for key, value in values.items()})
    for entry in fields:
        if choose is not None or "most" in entry.metadata:
            check_largest(under + entry.name, getattr(made, entry.name), entry.metadata.get("most", LARGEST))
    return made
