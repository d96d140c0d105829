"""Finds the included recipes. Nothing here imports torch, so that listing them is fast.

A file of this folder holds the recipes of one method on one dataset:

    mini-5wNs-feat.toml             mini-5w1s-feat and mini-5w5s-feat: {shots} stands for the number in all texts
        [shots.5.training]          what differs with five shots
        [variants.transductive]     mini-5w1s-feat-transductive and mini-5w5s-feat-transductive: what differs in both
        [variants.transductive.shots.5.training]

A file without a summary is no recipe: it holds what its variants share, or the files that name it as their base.
Training is validated and saved after each quarter of its steps, unless the file says otherwise.
"""

import copy
import functools
import tomllib
from pathlib import Path
from typing import Any

from trident.errors import TridentError, did_you_mean
from trident.files import read_regular

_MOST_BYTES = 2**20
FOLDER = Path(__file__).parent
SHOTS = ("1", "5")  # of files with several numbers of shots


def recipe_names() -> list[str]:
    return sorted(name for name, values in _included().items() if "summary" in values)


def facts() -> dict[str, dict[str, str]]:
    """What each included recipe is, for lists: its summary, dataset and method, by name."""
    recipes = {name: _whole(name) for name in recipe_names()}
    return {
        name: {"summary": values["summary"], "dataset": values["dataset"], "method": values["method"]["name"]}
        for name, values in recipes.items()
    }


def read_recipe(name: str) -> tuple[dict[str, Any], str]:
    """The values of an included recipe, by name, or of any recipe, by the path of its TOML file; and where they are."""
    if not name.endswith(".toml"):
        if name not in recipe_names():
            raise TridentError(f"no recipe is called '{name}'{did_you_mean(name, recipe_names())}")
        return {"name": name, **_with_quarters(_whole(name))}, f"recipe {name}"
    path = Path(name)
    if not path.is_file():
        raise TridentError(f"no recipe file at {path}")
    values = read_toml(path)
    base = values.pop("base", None)
    if base is not None:
        if base not in recipe_names():
            raise TridentError(f"{path}: base is {base!r}: it must be one of {', '.join(recipe_names())}")
        values = _merged(_with_quarters(_whole(base)), values)
    return {"name": path.stem, **values}, str(path)


def read_toml(path: Path) -> dict[str, Any]:
    return _parsed(_text(path), path)


@functools.cache
def _included() -> dict[str, dict[str, Any]]:
    """What the files of this folder say, by recipe, and what some recipes share."""
    recipes = {}
    for path in FOLDER.glob("*.toml"):
        text, stem = _text(path), path.stem
        for shots in SHOTS if "Ns" in stem else [""]:
            values = _parsed(text.replace("{shots}", shots), path)
            variants = {"": {}} | {f"-{suffix}": part for suffix, part in values.pop("variants", {}).items()}
            for suffix, variant in variants.items():
                recipe: dict[str, Any] = {"episode": {"n_shot": int(shots)}} if shots else {}
                for part in (values, variant):
                    own = {key: value for key, value in part.items() if key != "shots"}
                    recipe = _merged(_merged(recipe, own), part.get("shots", {}).get(shots, {}))
                recipes[stem.replace("Ns", f"{shots}s") + suffix] = recipe
    return recipes


def _whole(name: str) -> dict[str, Any]:
    """The values of an included recipe, and for what it does not say those of the recipe that it names as its base."""
    values = copy.deepcopy(_included()[name])
    base = values.pop("base", None)
    return _merged(_whole(base), values) if base else values


def _with_quarters(values: dict[str, Any]) -> dict[str, Any]:
    training = values.get("training", {})
    if "steps" in training:
        values["training"] = dict.fromkeys(("validate_every", "save_every"), training["steps"] // 4) | training
    return values


def _merged(before: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values, and for what they do not say those before. Another method or backbone inherits no settings."""
    merged = before | values
    for section, part in values.items():
        old = before.get(section)
        if isinstance(old, dict) and isinstance(part, dict) and part.get("name") in (None, old.get("name")):
            merged[section] = old | part
    return merged


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TridentError(f"{path} is not valid TOML: {error}") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and so is a number of 5000 digits
        raise TridentError(f"{path} is not valid TOML: {error}") from error
