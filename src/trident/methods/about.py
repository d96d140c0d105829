"""Facts about methods. Nothing here imports torch, so that listing the methods is fast."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trident.methods.registry import METHODS, method_class


@dataclass(frozen=True)
class About:
    """Facts about a method. `trident methods` prints them; training and measuring use them.

    They are literals, because the list of methods reads them from the source, and hold for the default settings.
    """

    title: str
    citation: str  # authors and year
    paper: str
    trained_on: Literal["episodes", "classes", "nothing"] = "episodes"  # classes: batches of all training classes
    transductive: bool = False  # whether queries are classified together, apart from batch norm
    analyses: tuple[str, ...] = ()  # further analyses that it supports: "latents", "reconstructions"
    any_way: bool = True  # whether trained weights can classify tasks with any number of classes
    positional: bool = False  # whether weights are tied to positions in the task, so that the order of images matters


def about(name: str) -> About:
    """The facts about a method. A method of another package is imported for that, one of this package is not."""
    if name not in METHODS:
        found: About = method_class(name).about
        return found
    module, _, own = METHODS[name].partition(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    source = path.read_text("utf-8")
    start = source.index("about = About(", source.index(f"class {own}("))
    line = source[start : source.index("\n", start)]
    text = line if line.endswith(")") else source[start : source.index("\n    )", start)] + ")"  # as ruff formats it
    (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    values = {str(one.arg): ast.literal_eval(one.value) for one in statement.value.keywords}
    return About(*map(ast.literal_eval, statement.value.args), **values)
