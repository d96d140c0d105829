"""Which methods there are, by name. Nothing is imported until a method is asked for.

A method in another installed package is found too, if that package declares it as an entry point of the group
`trident.methods`. Weights files name their method, so only names from here are ever imported, never a path from a file.
"""

from importlib.metadata import entry_points
from typing import Any

from trident.errors import TridentError
from trident.importing import imported

METHODS = {
    "trident": "trident.methods.trident.method:Trident",
    "protonet": "trident.methods.protonet:ProtoNet",
    "matching": "trident.methods.matching:MatchingNetwork",
    "simpleshot": "trident.methods.simpleshot:SimpleShot",
}


def method_paths() -> dict[str, str]:
    """The import path of every method, by name."""
    return METHODS | {entry.name: entry.value for entry in entry_points(group="trident.methods")}


def method_class(name: str) -> Any:
    paths = method_paths()
    if name not in paths:
        raise TridentError(f"no method is called '{name}': there are {', '.join(paths)}")
    return imported(paths[name])


def method_name(method: object) -> str:
    path = f"{type(method).__module__}:{type(method).__qualname__}"
    return next(name for name, known in method_paths().items() if known == path)
