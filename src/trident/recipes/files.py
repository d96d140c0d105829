"""Finds the included recipes. Nothing here imports torch, so that listing them is fast."""

import tomllib
from pathlib import Path
from typing import Any

from trident.errors import TridentError, did_you_mean
from trident.files import read_regular

_MOST_BYTES = 2**20
FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(name: str) -> tuple[dict[str, Any], Path]:
    """The values of an included recipe, by name, or of any recipe, by the path of its TOML file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise TridentError(f"no recipe file at {path}")
    elif name in recipe_names():
        path = FOLDER / f"{name}.toml"
    else:
        raise TridentError(f"no recipe is called '{name}'{did_you_mean(name, recipe_names())}")
    return {"name": path.stem, **_with_base(read_toml(path), path)}, path


def _with_base(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The values of a file, and for what it does not say those of the included recipe that it names as its base."""
    base = values.pop("base", None)
    if base is None:
        return values
    if base not in recipe_names():
        raise TridentError(f"{path}: base is {base!r}: it must be one of {', '.join(recipe_names())}")
    inherited = read_toml(FOLDER / f"{base}.toml")
    if "base" in inherited:
        raise TridentError(f"{path}: its base {base} has a base itself: name {inherited['base']} instead")
    for section, part in values.items():
        before = inherited.get(section)
        # Another method or backbone has other settings, so none are inherited.
        same = isinstance(before, dict) and isinstance(part, dict) and part.get("name") in (None, before.get("name"))
        inherited[section] = {**before, **part} if same and isinstance(before, dict) else part
    return inherited


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, and so is a number of 5000 digits
        raise TridentError(f"{path} is not valid TOML: {error}") from error
