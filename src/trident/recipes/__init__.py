"""Recipes: one TOML file per trained model. A recipe's name, or the path of a TOML file of one's own, loads it."""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trident.errors import TridentError
from trident.settings import Recipe

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or one's own by the path of its TOML file, with `key=value` overrides on top."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise TridentError(f"no recipe file at {path}")
        raise TridentError(f"no recipe is called '{name}'{nearest(name, recipe_names())}")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TridentError(f"{path} is not valid TOML: {error}") from error
    values.setdefault("name", path.stem)
    return with_overrides(recipe_from(values, str(path)), overrides)


def recipe_from(values: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested plain values, as in TOML or in a checkpoint; every key and type is checked."""
    try:
        return typing.cast(Recipe, _build(Recipe, values, ""))
    except TridentError as error:
        raise TridentError(f"{source}: {error}") from None


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    return dataclasses.asdict(recipe)


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply `section.key=value` settings. The section may be left out where the key is unique."""
    values = recipe_values(recipe)
    keys = dict(setting_types())
    for text in overrides:
        given, separator, value = text.partition("=")
        key = given.lstrip("-").replace("-", "_")
        if not separator:
            raise TridentError(f"'{text}' is not a setting: write KEY=VALUE, for example training.steps=100")
        matches = [known for known in keys if known == key or known.split(".")[1] == key]
        if len(matches) > 1:
            raise TridentError(f"setting '{key}' is ambiguous: write {' or '.join(matches)}")
        if not matches:
            short = [known.split(".")[1] for known in keys]
            raise TridentError(f"unknown setting '{key}'{nearest(key, [*keys, *short])}")
        section, name = matches[0].split(".")
        values[section][name] = _parse(value, keys[matches[0]], matches[0])
    return typing.cast(Recipe, _build(Recipe, values, ""))


def setting_types() -> Iterator[tuple[str, Any]]:
    """Every setting of a recipe as (section.key, type)."""
    for section in dataclasses.fields(Recipe):
        if dataclasses.is_dataclass(section.type):
            hints = typing.get_type_hints(section.type)
            yield from ((f"{section.name}.{name}", hint) for name, hint in hints.items())


def setting_help() -> dict[str, str]:
    sections = [entry for entry in dataclasses.fields(Recipe) if dataclasses.is_dataclass(entry.type)]
    return {
        f"{section.name}.{entry.name}": entry.metadata["help"]
        for section in sections
        for entry in dataclasses.fields(typing.cast(Any, section.type))
    }


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean '{close[0]}'?" if close else f": there are {', '.join(known)}"


def _build(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise TridentError(f"'{where.rstrip('.')}' must be a table of settings, not {values!r}")
    hints = typing.get_type_hints(kind)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise TridentError(f"unknown setting '{where}{unknown[0]}'{nearest(unknown[0], list(hints))}")
    missing = [
        entry.name
        for entry in dataclasses.fields(kind)
        if entry.default is dataclasses.MISSING and entry.name not in values
    ]
    if missing:
        raise TridentError(f"setting '{where}{missing[0]}' is missing")
    built = {
        key: _build(hints[key], value, f"{where}{key}.")
        if dataclasses.is_dataclass(hints[key])
        else _checked(value, hints[key], where + key)
        for key, value in values.items()
    }
    return kind(**built)


def _checked(value: Any, hint: Any, key: str) -> Any:
    """The value as its type wants it, or an error that says what would be right."""
    if isinstance(hint, types.UnionType):
        inner, _ = typing.get_args(hint)  # all unions are "something or None"
        return None if value is None or value == "none" else _checked(value, inner, key)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise TridentError(f"{key} is {value!r}: it must be one of {', '.join(choices)}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise TridentError(f"{key} is {value!r}: it must be {names[hint]}")
    return value


def _parse(text: str, hint: Any, key: str) -> Any:
    """A value from the command line, where everything is text."""
    if isinstance(hint, types.UnionType):
        inner, _ = typing.get_args(hint)
        return None if text.lower() == "none" else _parse(text, inner, key)
    if hint is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        return words.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text.replace("_", ""))
        except ValueError:
            return text
    return text
