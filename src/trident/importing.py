"""Imports an object by its path, so that a table of paths need not import everything in it."""

import importlib
from typing import Any


def imported(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
