"""Odd values and odd changes of nested values, for tests that try thousands of them."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bounds import bounded

_SPECIAL_NUMBERS = [0, 1, -1, 2, 3, 16, 64, 1000, 2**31, 2**63 - 1, 2**63, 10**18, 10**30, 10**400]
_SPECIAL_TEXTS = ["", "x" * 5000, "\x1b[31mred\n", "none", "../..", "/dev/zero", "nan", "true", "9" * 5000, "\ud800"]
_single = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_SPECIAL_NUMBERS),
    st.integers(),
    st.integers(0, 200),
    st.floats(),
    st.sampled_from(_SPECIAL_TEXTS),
    st.text(max_size=20),
)
REMOVED = object()
odd_values = st.one_of(
    _single,
    st.just(REMOVED),
    st.lists(_single, max_size=4),
    st.dictionaries(st.text(max_size=8), _single, max_size=3),
    st.integers(1, 2000).map(lambda depth: f"nested {depth}"),
)
odd_changes = st.lists(st.tuples(st.integers(0, 10**6), odd_values), min_size=1, max_size=3)


def to_json(value: Any) -> str:
    """As JSON, with deeply nested lists, which Python could not copy or print, where they are named."""
    return re.sub(r'"nested ([0-9]+)"', lambda found: int(found[1]) * "[" + int(found[1]) * "]", json.dumps(value))


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all parts of nested lists and dicts."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [way for key, part in inner for way in ((*before, key), *places(part, (*before, key)))]


def changed(value: Any, changes: list[tuple[int, Any]]) -> Any:
    """A copy with odd values in some places, or without what was there."""
    value = copy.deepcopy(value)
    for number, odd in changes:
        ways = places(value)
        if not ways:
            break
        *before, last = ways[number % len(ways)]
        inner = value
        for key in before:
            inner = inner[key]
        if odd is REMOVED:
            del inner[last]
        else:
            inner[last] = odd
    return value


def try_many(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Call `check` with so many drawn values. Each call has limits on its time and memory."""
    tried = 0

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(values=st.fixed_dictionaries(drawn))
    def run(values: dict[str, Any]) -> None:
        nonlocal tried
        tried += 1
        with bounded():
            check(**values)

    run()
    print(f"{tried} tried")
