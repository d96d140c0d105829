"""Objects by their import path, so that tables of names need not import what they name."""

import importlib
from typing import Any


def imported(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
