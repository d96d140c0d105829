"""The few-shot methods: `trident methods`."""

import sys
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import app
from trident.cli.tables import aligned
from trident.errors import TridentError, one_line
from trident.methods.registry import About, about, check_method, method_paths

FACTS = ("queries classified", "trained on", "classes in a task", "latents", "published")
TRAINED_ON = {"episodes": "tasks", "classes": "batches of all training classes", "nothing": "nothing"}


@app.command(short_help="List the methods, or explain one.")
def methods(
    name: Annotated[str | None, typer.Argument(help="A method: explain it and its settings.")] = None,
    as_json: opt.Json = False,
) -> None:
    """List the few-shot methods, or explain one with its settings.

    A recipe chooses a method by the name in its [method] table; the other keys of that table are the method's settings.
    """
    if name is not None:
        check_method(name)
        _explain(name, as_json)
        return
    known = {}
    for method in method_paths():
        try:
            known[method] = about(method)
        except TridentError as error:  # one of another package cannot be imported
            print(f"trident: {one_line(str(error))}", file=sys.stderr)
    if as_json:
        opt.print_json([_values(method, facts) for method, facts in known.items()])
        return
    rows = [(method, *_facts(facts)) for method, facts in known.items()]
    print("\n".join(aligned([("method", *FACTS), *rows])))
    print("\nTransductive batch norm (protocol.batch_norm), as in MAML's recipes, sees all queries of a task.")


def _explain(name: str, as_json: bool) -> None:
    from trident.engines.learners import learners_of
    from trident.methods.registry import method_class
    from trident.recipes.recipe import Recipe

    method = method_class(name)()
    facts, engines = method.about, list(learners_of(type(method)))
    if as_json:
        opt.print_json({**_values(name, facts), "engines": engines})
        return
    print(f"{name}: {facts.title} ({facts.citation}, {facts.paper})\n")
    print(textwrap.dedent(f"    {type(method).__doc__}").strip())
    print()
    for fact, value in zip((*FACTS, "engines"), (*_facts(facts), " and ".join(engines)), strict=True):
        print(f"{fact}: {value}")
    print("\nSettings of the [method] table, with their defaults:\n")
    opt.print_settings(Recipe(name, "", "", method=method), "method")


def _values(name: str, facts: About) -> dict[str, object]:
    values = {key: value for key, value in asdict(facts).items() if key != "analyses"}
    return {"name": name, **values, "latents": "latents" in facts.analyses}


def _facts(facts: About) -> tuple[str, ...]:
    return (
        "together (transductive)" if facts.transductive else "each alone (inductive)",
        TRAINED_ON[facts.trained_on],
        "any number" if facts.any_way else "as in training",
        "yes" if "latents" in facts.analyses else "no",
        facts.citation,
    )
