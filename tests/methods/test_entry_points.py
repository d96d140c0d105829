"""Methods of other packages: found by entry points, and never in the way of the rest."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest

from commands import assert_one_line_error
from trident.errors import TridentError
from trident.methods import registry
from trident.methods.metric.matching import MatchingNetwork
from trident.methods.metric.protonet import ProtoNet


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that an installed package declares these methods."""

    def declare(**paths: str) -> None:
        found = [EntryPoint(name, path, "trident.methods") for name, path in paths.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "trident.methods" else [])
        registry.of_other_packages.cache_clear()

    yield declare
    registry.of_other_packages.cache_clear()


def test_a_method_of_another_package_is_found_by_its_name(declared: Callable[..., None]) -> None:
    declared(theirs="tiny:TheirMethod")
    import tiny

    kind = registry.method_class("theirs")
    assert kind is tiny.TheirMethod
    assert registry.method_name(kind()) == "theirs"


def test_no_package_replaces_a_method_of_this_one(declared: Callable[..., None]) -> None:
    declared(protonet="trident.methods.metric.matching:MatchingNetwork")
    assert registry.method_class("protonet") is ProtoNet
    assert registry.method_name(MatchingNetwork()) == "matching"


@pytest.mark.parametrize("path", ["no_such_module:X", "json:no_such_name", "json:loads", "json"])
def test_a_broken_method_costs_a_line_and_nothing_else(
    path: str, declared: Callable[..., None], trident_here: Callable
) -> None:
    declared(broken=path)
    with pytest.raises(TridentError, match="broken"):
        registry.method_class("broken")
    listed = trident_here("methods")
    assert listed.returncode == 0
    assert "protonet" in listed.stdout and "method 'broken'" in listed.stderr
    assert_one_line_error(trident_here("methods", "broken"), "broken")
