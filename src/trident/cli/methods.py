"""The few-shot methods: `trident methods`."""

import json
import sys
import textwrap
from typing import Annotated, Any

import typer

from trident.cli.app import app
from trident.cli.options import Json, print_settings
from trident.cli.tables import aligned
from trident.errors import TridentError, one_line

FACTS = ("queries classified", "trained on", "classes in a task", "latents", "engines", "published")
TRAINED_ON = {"episodes": "tasks", "classes": "batches of all training classes", "nothing": "nothing"}


@app.command(short_help="List the methods, or explain one.")
def methods(
    name: Annotated[str | None, typer.Argument(help="A method: explain it and its settings.")] = None,
    as_json: Json = False,
) -> None:
    """List the few-shot methods, or explain one with its settings.

    A recipe chooses a method by the name in its [method] table; the other keys of that table are the method's settings.
    """
    from trident.methods.registry import method_class, method_paths

    if name is None:
        found = [about for about in map(_described_if_possible, method_paths()) if about is not None]
        if as_json:
            print(json.dumps(found))
            return
        print("\n".join(aligned([("method", *FACTS), *map(_row, found)])))
        print("\nTransductive batch norm (protocol.batch_norm), as in MAML's recipes, sees all queries of a task.")
        return
    about = _described(name)
    if as_json:
        print(json.dumps(about))
        return
    from trident.recipes.recipe import Recipe

    method = method_class(name)
    print(f"{name}: {about['title']} ({about['citation']}, {about['paper']})\n")
    print(textwrap.dedent(f"    {method.__doc__}").strip())
    print()
    for fact, value in zip(FACTS, _row(about)[1:], strict=True):
        print(f"{fact}: {value}")
    print()
    print("Settings of the [method] table, with their defaults:\n")
    print_settings(Recipe(name, "", "", method=method()), "method")


def _described_if_possible(name: str) -> dict[str, Any] | None:
    """None, and a line on standard error, for a method of another package that cannot be imported."""
    try:
        return _described(name)
    except TridentError as error:
        print(f"trident: {one_line(str(error))}", file=sys.stderr)
        return None


def _described(name: str) -> dict[str, Any]:
    from trident.methods.registry import method_class

    method = method_class(name)()
    about = method.about
    return {
        "name": name,
        "title": about.title,
        "citation": about.citation,
        "paper": about.paper,
        "transductive": method.classifies_together,
        "trained_on": about.trained_on,
        "any_way": method.any_way,
        "latents": "latents" in about.analyses,
        "engines": list(method.learners),
        "positional": method.positional,
    }


def _row(about: dict[str, Any]) -> tuple[str, ...]:
    return (
        about["name"],
        "together (transductive)" if about["transductive"] else "each alone (inductive)",
        TRAINED_ON[about["trained_on"]],
        "any number" if about["any_way"] else "as in training",
        "yes" if about["latents"] else "no",
        " and ".join(about["engines"]),
        about["citation"],
    )
