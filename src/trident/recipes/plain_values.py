"""From the plain values of TOML and JSON to checked dataclasses. Nothing here imports torch."""

import dataclasses
import types
import typing
from typing import Any

from trident.errors import TridentError, did_you_mean
from trident.settings import check_largest, hints_of, require

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a table"}


def checked(kind: Any, value: Any, where: str = "") -> Any:
    """A value converted to the type `kind`, often a dataclass. Errors name the key, which begins with `where`."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any or (isinstance(kind, types.UnionType) and value is None):
        return value
    if isinstance(kind, types.UnionType):  # all unions are "something or None"
        return checked(inner[0], value, where)
    if origin is typing.Literal:
        require(value in inner, f"{where} is {value!r}: it must be one of {', '.join(inner)}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    plain: Any = dict if dataclasses.is_dataclass(kind) else list if origin is tuple else origin
    if type(value) is not plain:
        raise TridentError(f"{where or 'it'} is {value!r}: it must be {_NAMES[plain]}")
    if plain is list:
        return origin(checked(inner[0], entry, f"{where}[{place}]") for place, entry in enumerate(value))
    if plain is not dict:
        return value
    under = f"{where}." if where else ""
    if origin is dict:
        return {key: checked(inner[1], entry, under + key) for key, entry in value.items()}
    hints = hints_of(kind)
    for key in value:
        require(key in hints, f"unknown key '{under}{key}'{did_you_mean(key, list(hints))}")
    for entry in dataclasses.fields(kind):
        needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        require(not needed or entry.name in value, f"'{under}{entry.name}' is missing")
    built = {key: checked(hints[key], entry, under + key) for key, entry in value.items()}
    for entry in dataclasses.fields(kind):
        if "most" in entry.metadata and entry.name in built:
            check_largest(under + entry.name, built[entry.name], entry.metadata["most"])
    return kind(**built)
