"""From TOML or a checkpoint to a checked `Recipe`, and back to plain values."""

import dataclasses
import reprlib
import types
import typing
from collections.abc import Sequence
from typing import Any

from trident.backbones import BACKBONES
from trident.errors import TridentError, did_you_mean, is_shown
from trident.importing import imported
from trident.methods.base import Method
from trident.methods.registry import method_class, method_name
from trident.nn.parameters import count
from trident.recipes.files import read_recipe
from trident.recipes.recipe import Recipe
from trident.settings import LARGEST, check_largest, hints_of, require

MOST_CHARACTERS = 1000  # of a setting that is text
MOST_VALUES = 2**34  # in the images of one training step
MOST_PARAMETERS = 2**28  # 1 GiB in single precision
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

RETIRED = {"method.label_prior": "standard_normal", "method.semantic_prior": "standard_normal"}  # settings of older
# files, with the only value that they could have


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """An included recipe by name, or any by the path of its TOML file, with `key=value` overrides applied."""
    values, path = read_recipe(name)
    return with_overrides(recipe_from(values, str(path)), overrides)


def recipe_from(values: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested plain values, as in TOML or in a checkpoint; every key and type is checked."""
    try:
        return _sized(typing.cast(Recipe, _build(Recipe, values, "")))
    except TridentError as error:
        raise TridentError(f"{source}: {error}") from None


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    values = dataclasses.asdict(recipe)
    values["method"] = {"name": method_name(recipe.method), **values["method"]}
    values["backbone"] = {"name": _backbone_name(recipe.backbone), **values["backbone"]}
    return values


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """The value of every setting of a recipe by section.key, with the names of its method and its backbone."""
    parts = {name: part for name, part in recipe_values(recipe).items() if isinstance(part, dict)}
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}


def method_from(name: str, values: Any) -> Method:
    """A method from plain values; every key and type is checked."""
    if not isinstance(values, dict):
        raise TridentError(f"'method' must be a table of settings, not {_short(values)}")
    return typing.cast(Method, _build(Method, {**values, "name": name}, "method."))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply `section.key=value` settings. The section may be omitted where the key is unique."""
    if not overrides:
        return recipe
    values = recipe_values(recipe)
    keys = setting_types(recipe)
    for text in overrides:
        given, separator, value = text.partition("=")
        key = given.lstrip("-").replace("-", "_")
        if not separator:
            raise TridentError(f"'{text}' is not a setting: write KEY=VALUE, for example training.steps=100")
        known = full_key(recipe, key)
        section, name = known.split(".")
        values[section][name] = _parse(value, keys[known])
    return _sized(typing.cast(Recipe, _build(Recipe, values, "")))


def full_key(recipe: Recipe, key: str) -> str:
    """`section.key` of a setting, whose section may be omitted."""
    keys = setting_types(recipe)
    matches = [known for known in keys if known == key or known.split(".")[1] == key]
    if len(matches) > 1:
        raise TridentError(f"setting '{key}' is ambiguous: write {' or '.join(matches)}")
    if key in ("method.name", "backbone.name"):
        raise TridentError(f"{key} is chosen in the recipe's file, it cannot be changed on the command line")
    if not matches:
        short = [known.split(".")[1] for known in keys]
        raise TridentError(f"unknown setting '{key}'{did_you_mean(key, [*keys, *short])}")
    return matches[0]


def setting_of(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def formatted(value: Any) -> str:
    """A setting's value as written in a recipe or on the command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def setting_types(recipe: Recipe) -> dict[str, Any]:
    """The type of every setting of a recipe, by section.key, including the method's settings."""
    return {
        f"{section}.{entry.name}": hints_of(kind)[entry.name]
        for section, kind in _sections(recipe)
        for entry in dataclasses.fields(kind)
    }


def setting_help(recipe: Recipe) -> dict[str, str]:
    return {
        f"{section}.{entry.name}": entry.metadata["help"]
        for section, kind in _sections(recipe)
        for entry in dataclasses.fields(kind)
    }


def setting_bounds(recipe: Recipe) -> dict[str, float]:
    """The largest value of every setting that is a number, by section.key."""
    return {
        f"{section}.{entry.name}": entry.metadata["most"]
        for section, kind in _sections(recipe)
        for entry in dataclasses.fields(kind)
    }


def after_training(recipe: Recipe) -> set[str]:
    """The settings that may be changed for trained weights: how they are measured, and how the method predicts."""
    own = {f"method.{entry.name}" for entry in dataclasses.fields(recipe.method) if entry.metadata["after_training"]}
    sections = {"episode", "protocol", "views"}
    if recipe.method.about.trained_on == "nothing":
        sections.add("backbone")  # nothing was trained on its features
    return own | {key for key in setting_types(recipe) if key.split(".")[0] in sections}


def _sections(recipe: Recipe) -> list[tuple[str, Any]]:
    parts = [(entry.name, getattr(recipe, entry.name)) for entry in dataclasses.fields(recipe)]
    return [(name, type(part)) for name, part in parts if dataclasses.is_dataclass(part)]


def _build(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise TridentError(f"'{where.rstrip('.')}' must be a table of settings, not {_short(values)}")
    if where in ("method.", "backbone."):
        kind, values = _named(values, where)
    values = {key: value for key, value in values.items() if RETIRED.get(f"{where}{key}", ...) != value}
    hints = {entry.name: hints_of(kind)[entry.name] for entry in dataclasses.fields(kind)}
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise TridentError(f"unknown setting {_short(where + unknown[0])}{did_you_mean(unknown[0], list(hints))}")
    needed = [entry.name for entry in dataclasses.fields(kind) if _has_no_default(entry)]
    missing = [name for name in needed if name not in values]
    if missing:
        raise TridentError(f"setting '{where}{missing[0]}' is missing")
    built = {
        key: _build(hints[key], value, f"{where}{key}.")
        if dataclasses.is_dataclass(hints[key])
        else _checked(value, hints[key], where + key)
        for key, value in values.items()
    }
    made = kind(**built)
    for entry in dataclasses.fields(kind):
        check_largest(where + entry.name, getattr(made, entry.name), entry.metadata.get("most", LARGEST))
    return made


def _sized(recipe: Recipe) -> Recipe:
    """The recipe, after a check of what its settings amount to together."""
    training, own = recipe.in_training(), recipe.training
    per_class = recipe.method.about.trained_on == "classes"
    images = max(
        own.images_per_step if per_class else own.tasks_per_step * training.episode.n_images, recipe.episode.n_images
    )
    values = images * recipe.backbone.numbers_per_image
    require(
        values <= MOST_VALUES,
        f"the images of a step have {values:.3g} values together, {MOST_VALUES:.3g} at most: lower "
        "backbone.image_size, the tasks of a step or the images of a task",
    )
    try:
        parameters = count(recipe.shapes())
    except RuntimeError as error:  # torch's numbers of elements have an end
        raise TridentError(f"the settings make a network of impossible size: {str(error).splitlines()[0]}") from error
    require(
        parameters <= MOST_PARAMETERS,
        f"the network has {parameters:.3g} parameters, {MOST_PARAMETERS:.3g} at most: make its layers smaller",
    )
    return recipe


def _named(values: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The class that a [method] or [backbone] table names, and the settings for it."""
    default = "trident" if where == "method." else "conv4"
    name, rest = values.get("name", default), {key: value for key, value in values.items() if key != "name"}
    name = _checked(name, str, f"{where}name")
    if where == "method.":
        return method_class(name), rest
    if name not in BACKBONES:
        raise TridentError(f"backbone.name is '{name}': it must be one of {', '.join(BACKBONES)}")
    return imported(BACKBONES[name]), rest


def _backbone_name(backbone: Any) -> str:
    return next(name for name, path in BACKBONES.items() if imported(path) is type(backbone))


def _has_no_default(entry: "dataclasses.Field[Any]") -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = 200


def _short(value: Any) -> str:
    """A value in a message: in quotes, and shortened, because it can be long or deeply nested."""
    try:
        return _SHORTENED.repr(value)
    except ValueError:  # Python does not write out numbers of thousands of digits
        return "too long a number"


def _checked(value: Any, hint: Any, key: str) -> Any:
    """The value converted to its type, or an error that says what is allowed."""
    if isinstance(hint, types.UnionType):
        inner, _ = typing.get_args(hint)  # all unions are "something or None"
        return None if value is None or value == "none" else _checked(value, inner, key)
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise TridentError(f"{key} is {_short(value)}: it must be one of {', '.join(choices)}")
        return value
    if isinstance(value, int) and abs(value) >= 2**63:
        raise TridentError(f"{key} is too large a number: it must be below 2**63")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise TridentError(f"{key} is {_short(value)}: it must be {names[hint]}")
    if isinstance(value, str) and (len(value) > MOST_CHARACTERS or not is_shown(value)):
        raise TridentError(
            f"{key} is {_short(value)}: it must be text of at most {MOST_CHARACTERS} printable characters"
        )
    return value


def _parse(text: str, hint: Any) -> Any:
    """A value from the command line, where everything is text; `_checked` checks it."""
    if isinstance(hint, types.UnionType):
        inner, _ = typing.get_args(hint)
        return None if text.lower() == "none" else _parse(text, inner)
    if hint is bool:
        return BOOLEANS.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text.replace("_", ""))
        except ValueError:
            return text
    return text
