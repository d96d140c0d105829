"""Imports by name: what a table of paths names, so that it need not import everything in it, and optional packages."""

import importlib
from typing import Any

from trident.errors import TridentError


def imported(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def needed(module: str, what: str, extra: str = "analysis") -> Any:
    """A module of an optional package, for `what` needs it: for example "figures need matplotlib"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TridentError(f"{what}: pip install 'trident-fewshot[{extra}]'") from error
