"""From TOML or a checkpoint to a checked `Recipe`, and back to plain values."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from trident.backbones import BACKBONES
from trident.errors import TridentError, did_you_mean, errors_in
from trident.importing import imported
from trident.methods.base import Method
from trident.methods.registry import method_class, method_name
from trident.nn.parameters import count
from trident.recipes.files import read_recipe
from trident.recipes.plain_values import checked, short
from trident.recipes.recipe import Recipe
from trident.settings import hints_of, require

MOST_VALUES = 2**34  # in the images of one training step
MOST_PARAMETERS = 2**28  # 1 GiB in single precision
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Settings of methods that are gone, with the only value of theirs that old weights and recipes may still give.
RETIRED: dict[str, dict[str, Any]] = {
    "trident": {"label_prior": "standard_normal", "semantic_prior": "standard_normal"},
    "laplacian-shot": {"rectify": True, "compare_shifted": True},
    "metaqda": {"rule": "map"},
    "ssr": {"through_turns": False},
}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """An included recipe by name, or any by the path of its TOML file, with `key=value` overrides applied."""
    return with_overrides(recipe_from(*read_recipe(name)), overrides)


def recipe_from(values: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested plain values, as in TOML or in a checkpoint; every key and type is checked."""
    with errors_in(source):
        return _sized(typing.cast(Recipe, checked(Recipe, values, "", _class_and_values)))


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
        raise TridentError(f"'method' must be a table of settings, not {short(values)}")
    return typing.cast(Method, checked(Method, {**values, "name": name}, "method", _class_and_values))


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
    return _sized(typing.cast(Recipe, checked(Recipe, values, "", _class_and_values)))


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
    return {key: hints_of(kind)[entry.name] for key, kind, entry in _settings(recipe)}


def setting_help(recipe: Recipe) -> dict[str, str]:
    return {key: entry.metadata["help"] for key, _, entry in _settings(recipe)}


def setting_bounds(recipe: Recipe) -> dict[str, float]:
    """The largest value of every setting that is a number, by section.key."""
    return {key: entry.metadata["most"] for key, _, entry in _settings(recipe)}


def after_training(recipe: Recipe) -> set[str]:
    """The settings that may be changed for trained weights: how they are measured, and how the method predicts."""
    free = {"episode", "protocol", "views"}
    if recipe.method.about.trained_on == "nothing":
        free.add("backbone")  # nothing was trained on its features
    return {key for key, _, entry in _settings(recipe) if key.split(".")[0] in free or entry.metadata["after_training"]}


def _settings(recipe: Recipe) -> Iterator[tuple[str, type, "dataclasses.Field[Any]"]]:
    """section.key of every setting, the class that it belongs to, and its field."""
    for section in dataclasses.fields(recipe):
        kind = type(getattr(recipe, section.name))
        if dataclasses.is_dataclass(kind):
            yield from ((f"{section.name}.{entry.name}", kind, entry) for entry in dataclasses.fields(kind))


def _class_and_values(kind: Any, values: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The class that a [method] or [backbone] table names, and its settings without those that are gone."""
    if where in ("method", "backbone"):
        default = "trident" if where == "method" else "conv4"
        name = checked(str, values.get("name", default), f"{where}.name", _class_and_values)
        values = {key: value for key, value in values.items() if key != "name"}
        if where == "method":
            kind = method_class(name)
        elif name in BACKBONES:
            kind = imported(BACKBONES[name])
        else:
            raise TridentError(f"backbone.name is '{name}': it must be one of {', '.join(BACKBONES)}")
    known, retired = hints_of(kind), RETIRED.get(name, {}) if where == "method" else {}
    return kind, {key: value for key, value in values.items() if key in known or retired.get(key, ...) != value}


def _sized(recipe: Recipe) -> Recipe:
    """The recipe, after a check of what its settings amount to together."""
    training, in_step = recipe.training, recipe.training.images_per_step
    if recipe.method.about.trained_on != "classes":
        in_step = training.tasks_per_step * recipe.in_training().episode.n_images
    values = max(in_step, recipe.episode.n_images) * recipe.backbone.numbers_per_image
    if values > MOST_VALUES:
        raise TridentError(
            f"the images of a step have {values:.3g} values together, {MOST_VALUES:.3g} at most: lower "
            "backbone.image_size, the tasks of a step or the images of a task"
        )
    try:
        parameters = count(recipe.shapes())
    except RuntimeError as error:  # torch's numbers of elements have an end
        raise TridentError(f"the settings make a network of impossible size: {str(error).splitlines()[0]}") from error
    most = f"{MOST_PARAMETERS:.3g} at most: make its layers smaller"
    require(parameters <= MOST_PARAMETERS, f"the network has {parameters:.3g} parameters, {most}")
    return recipe


def _backbone_name(backbone: Any) -> str:
    return next(name for name, path in BACKBONES.items() if imported(path) is type(backbone))


def _parse(text: str, hint: Any) -> Any:
    """A value from the command line, where everything is text; `checked` checks it."""
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
