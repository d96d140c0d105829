"""Bounds on what a pickle may hold: the number of its elements and its depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_ELEMENTS = 2**24  # the largest pickle of tieredImageNet holds 448,695 images
_MOST_DEPTH = 32


class TooLargeError(Exception):
    """The pickle asks for more work or memory than a dataset needs."""


def _parts(value: Any) -> Sequence[Any]:
    """The elements of a list, dict or the like, in order; of anything else none."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else ()


def _has_parts(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype.hasobject)
    return isinstance(value, dict | list | tuple | set | frozenset)


def check_extent(value: Any) -> None:
    """Check the depth and the number of elements of what a pickle holds, counting shared parts wherever they appear.

    Each part is looked at once, whatever the number of places where it appears.
    """
    extents: dict[int, tuple[int, int]] = {}  # of parts that are done: number of elements, depth
    ancestors: set[int] = set()  # of the part that is looked at
    waiting = [value]
    while waiting:
        part = waiting[-1]
        elements = _parts(part)
        inner = [element for element in elements if _has_parts(element)]
        if id(part) in extents:
            waiting.pop()
        elif id(part) not in ancestors:  # its elements come first
            ancestors.add(id(part))
            if any(id(element) in ancestors for element in inner):
                raise TooLargeError("a list or dict that contains itself")
            waiting += [element for element in inner if id(element) not in extents]
        else:
            waiting.pop()
            ancestors.remove(id(part))
            number = 1 + len(elements) + sum(extents[id(element)][0] for element in inner)
            depth = 1 + max((extents[id(element)][1] for element in inner), default=0)
            if number > _MOST_ELEMENTS or depth > _MOST_DEPTH:
                raise TooLargeError(f"more than {_MOST_ELEMENTS} elements, or lists more than {_MOST_DEPTH} deep")
            extents[id(part)] = number, depth
