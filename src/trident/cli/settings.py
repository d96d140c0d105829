"""How settings are printed."""

from typing import TYPE_CHECKING, Literal, get_args, get_origin

if TYPE_CHECKING:
    from trident.recipes.recipe import Recipe


def print_settings(recipe: "Recipe", section: str | None = None) -> None:
    """Every setting of a recipe, or of one section of it, with its value, its meaning and its choices."""
    from trident.recipes.loading import formatted, setting_bounds, setting_help, setting_of, setting_types

    bounds = setting_bounds(recipe)
    types, meanings = setting_types(recipe), setting_help(recipe)
    chosen = [key for key in meanings if section in (None, key.split(".")[0])]
    rows = {key: f"{key}={formatted(setting_of(recipe, key))}" for key in chosen}
    width = max(map(len, rows.values()), default=0)
    for key, row in rows.items():
        choices = f" [{'|'.join(get_args(types[key]))}]" if get_origin(types[key]) is Literal else ""
        largest = f" [at most {bounds[key]:.19g}]" if types[key] in (int, int | None) else ""
        print(f"{row:{width}} {meanings[key]}{choices}{largest}")
