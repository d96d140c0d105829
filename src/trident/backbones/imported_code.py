"""The code of a module and of what it imports from the same folder or package, found by reading import statements."""

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path

from trident.files import MOST_WEIGHTS, read_regular


def imported_code(name: str, others: Iterable[str] = ()) -> dict[str, bytes]:
    """The code of a loaded module, of `others` and of all that they import, directly or not, by the modules' names.

    Only what lies in the folder where Python found the module; for an installed one, only what is in its package. Of
    compiled code, the file that was loaded, but not what it imports.
    """
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    root = file.parents[name.count(".") + (file.name.partition(".")[0] == "__init__")] if file.name else file
    package = name.partition(".")[0] if {"site-packages", "dist-packages"} & {*root.parts} else None
    found: dict[str, bytes] = {}
    waiting = [file.stem if name == "__main__" else name, *others] if file.name else []
    while waiting:
        one = waiting.pop()
        parent, path = one.rpartition(".")[0], root.joinpath(*one.split("."))
        if one and one not in found and package in (None, one.partition(".")[0]):
            places = {path / "__init__.py": one, path.with_name(f"{path.name}.py"): parent}
            loaded = Path(getattr(sys.modules.get(one), "__file__", None) or "")
            if loaded.parent in (path, path.parent):
                places.setdefault(loaded, parent)
            for place, base in places.items():
                if place.is_file():
                    code = read_regular(place, MOST_WEIGHTS)
                    found[one] = found.get(one, b"") + code
                    waiting += [parent, *_imported(code, base)]
    return found


def _imported(code: bytes, package: str) -> Iterator[str]:
    """The names of all modules that the code of a module in this package may import."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):  # so Python could not import it
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
