"""Backbones that are ONNX files."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from backbone_pictures import message, noise, scaled
from onnx_files import WEIGHTS, small_onnx
from trident.backbones.pretrained import (
    BATCH,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Facts,
    find_backbone,
)


def expected_of_onnx(pixels: np.ndarray, mean: Any = IMAGENET_MEAN, std: Any = IMAGENET_STD) -> np.ndarray:
    maps = nn.functional.conv2d(scaled(pixels, mean, std), torch.from_numpy(WEIGHTS))
    found: np.ndarray = maps.mean((2, 3)).numpy()
    return found


@pytest.mark.parametrize("batch", ["picture", 1, 5, 16, 40])
def test_an_onnx_file_gives_what_torch_gives(tmp_path: Path, batch: str | int) -> None:
    found = find_backbone(small_onnx(tmp_path / "a.onnx", (batch, 3, 16, 16)))
    assert (found.n_features, found.facts.image_size) == (5, 16)
    pixels = noise(BATCH + 3)
    features = found.features(pixels)
    assert features.dtype == np.float32
    assert np.abs(features - expected_of_onnx(pixels)).max() < 1e-4
    for start, stop in ((0, 1), (18, 19), (2, 5), (1, 17)):
        assert np.array_equal(found.features(pixels[start:stop]), features[start:stop])


def test_the_settings_of_an_onnx_file(tmp_path: Path) -> None:
    name = small_onnx(tmp_path / "a.onnx", ("picture", 3, "height", "width"))
    assert find_backbone(name).facts == Facts(224, IMAGENET_MEAN, IMAGENET_STD, "unknown", "unknown")
    settings = 'image_size = 32\nmean = [1, 2, 3]\nstd = [4, 5, 6]\nlicence = "mine"\ntrained_on = "my pictures"\n'
    (tmp_path / "a.toml").write_text(settings)
    found = find_backbone(name)
    assert found.facts == Facts(32, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "mine", "my pictures")
    pixels = noise(2, 32)
    assert np.abs(found.features(pixels) - expected_of_onnx(pixels, (1, 2, 3), (4, 5, 6))).max() < 1e-4
    (tmp_path / "a.toml").write_text("size = 32")
    assert "unknown setting 'size'; there are image_size, centre_crop, mean" in message(name)
    (tmp_path / "a.toml").write_text("image_size = ")
    assert f"cannot read {tmp_path / 'a.toml'}" in message(name)
    (tmp_path / "a.toml").write_text("image_size = 'large'")
    assert "image_size is 'large': it must be a whole number" in message(name)
    (tmp_path / "a.toml").write_text("image_size = 20")
    assert "16x16, but its settings say 20" in message(small_onnx(tmp_path / "a.onnx"))


def test_the_fingerprint_of_an_onnx_file(tmp_path: Path) -> None:
    name = small_onnx(tmp_path / "a.onnx")
    first = find_backbone(name).fingerprint
    assert find_backbone(small_onnx(tmp_path / "b.onnx")).fingerprint == first
    assert find_backbone(small_onnx(tmp_path / "b.onnx", weights=WEIGHTS + 1)).fingerprint != first
    (tmp_path / "a.toml").write_text("mean = [1, 2, 3]")
    assert find_backbone(name).fingerprint != first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"end": "two inputs"}, "it must have one input"),
        ({"shape": ("picture", 1, 16, 16), "weights": WEIGHTS[:, :1]}, "['picture', 1, 16, 16]: it must have one"),
        ({"shape": ("picture", 3, 16, 20)}, "16x20: they must be square"),
        ({"shape": ("picture", 3, 8, 8)}, "between 16 and 1024"),
        ({"end": "maps"}, "take the mean over height and width"),
        ({"end": "ReduceSum"}, "shape ()"),
        ({"end": "ArgMax"}, "gives tensor(int64)"),
        ({"weights": WEIGHTS * np.nan}, "NaN or infinity"),
    ],
)
def test_an_onnx_network_that_cannot_be_used(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in message(small_onnx(tmp_path / "a.onnx", **options))


def test_damaged_onnx_files(tmp_path: Path) -> None:
    name = small_onnx(tmp_path / "a.onnx")
    content = (tmp_path / "a.onnx").read_bytes()
    for damaged in (b"", b"<html>not found</html>", content[: len(content) // 2]):
        (tmp_path / "a.onnx").write_bytes(damaged)
        assert "a.onnx is not an ONNX file that can be run" in message(name)
    (tmp_path / "a.onnx").unlink()
    assert "No such file" in message(name)


def test_weights_in_another_file_are_refused_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_onnx(tmp_path / "a.onnx")
    options: Any = {"save_as_external_data": True, "location": "a.data", "size_threshold": 0}
    onnx.save(onnx.load(tmp_path / "a.onnx"), tmp_path / "b.onnx", **options)
    assert (tmp_path / "a.data").exists()
    monkeypatch.chdir(tmp_path)
    assert "save all in one" in message("onnx:b.onnx")


def test_onnxruntime_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install -e '.[onnx]'" in message(small_onnx(tmp_path / "a.onnx"))
