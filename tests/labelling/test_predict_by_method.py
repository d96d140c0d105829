"""`trident predict --method`: every method labels a pile, or says in one line why it cannot."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from stand_in_backbone import NAME, save_support_and_pile
from trident.methods.registry import METHODS, method_class

Here = Callable[..., Answer]
UNTRAINED = [name for name in METHODS if method_class(name).about.trained_on == "nothing"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes with two labelled pictures each, and a pile of fifteen."""
    save_support_and_pile(tmp_path)
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def accuracy(table: str) -> float:
    rows = list(csv.DictReader(io.StringIO(table)))
    assert len(rows) == 15
    return float(np.mean([Path(row["path"]).name.split("-")[0] == row["label"] for row in rows]))


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.usefixtures("folders")
def test_methods_without_training_take_features(name: str, trident_here: Here) -> None:
    found = trident_here("predict", "--support", "support", "--query", "pile", "--backbone", NAME, "--method", name)
    assert found.returncode == 0, found.stderr
    assert accuracy(found.stdout) >= 0.8
    assert "of these labels will be right" in found.stderr and "not calibrated" not in found.stderr


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNTRAINED])
@pytest.mark.usefixtures("folders")
def test_trained_methods_use_their_weights_or_say_why_not(name: str, trident_here: Here) -> None:
    call = ("predict", "--support", "support", "--query", "pile", "--method", name)
    found = trident_here(*call)
    assert found.returncode == 0 or name != "baseline"  # which has SimpleShot's network
    if found.returncode == 0:
        assert accuracy(found.stdout) >= 0.4  # weights of photographs, pictures of plain colours
    else:
        assert_one_line_error(found, "")
        assert any(
            words in found.stderr
            for words in ("no weights of it are installed", "these weights classify 5 ways, not 3", "needs pictures")
        ), found.stderr
    assert_one_line_error(trident_here(*call, "--backbone", NAME), "has weights for conv4 only")


@pytest.mark.usefixtures("folders")
def test_a_method_and_something_that_has_one_exclude_each_other(trident_here: Here) -> None:
    call = ("predict", "--support", "support", "--query", "pile", "--method", "bms")
    assert_one_line_error(trident_here(*call, "--weights", "mini-5w1s-set"), "--method excludes --model and --weights")
    assert_one_line_error(trident_here(*call[:-1], "none"), "no method is called 'none'")
