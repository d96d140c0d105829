"""Backbones that are Python functions of the user."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from backbone_pictures import message, noise, scaled
from trident.backbones.pretrained import (
    BATCH,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Facts,
    find_backbone,
)
from trident.backbones.python_function import facts_from, imported_code
from trident.backbones.torch_module import probe
from trident.errors import TridentError

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
    assert found.facts == Facts(224, IMAGENET_MEAN, IMAGENET_STD, "unknown", "unknown")


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


def test_the_fingerprint_covers_what_the_code_imports(write: Write, tmp_path: Path) -> None:
    files = {
        "users_pack/__init__": "",
        "users_pack/net": "def made():\n    from .deep import last\n    from users_beside import VALUE",
        "users_pack/deep/__init__": "from ..other import (\n    something,\n)",
        "users_pack/deep/last": "import torch, no_such_package",
        "users_pack/other": "something = 1\nfrom .... import beyond\nimport users_broken",
        "users_pack/unused": "import users_unused",
        "users_beside": "VALUE = 1\nimport users_pack.net",
        "users_broken": "import (",
        "users_unused": "",
    }
    for name, code in files.items():
        (tmp_path / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(code)
    for name in ("users_pack.unused", "users_pack.net", "safetensors.numpy"):  # the first changes nothing
        importlib.import_module(name)
    used = {name.removesuffix("/__init__").replace("/", "."): code.encode() for name, code in files.items()}
    del used["users_pack.unused"], used["users_unused"]
    assert imported_code("users_pack.net") == used
    assert set(imported_code("users_pack.net", ["users_unused", "torch.nn"])) == {*used, "users_unused"}
    assert set(imported_code("trident")) >= {"trident"} and imported_code("sys") == {}
    assert {name.partition(".")[0] for name in imported_code("safetensors.numpy")} == {"safetensors"}  # installed

    code = "import users_beside\n\n\n" + small("return x.mean((2, 3)) * users_beside.VALUE")
    first = find_backbone(write(code)).fingerprint
    (tmp_path / "users_unused.py").write_text("1")
    assert find_backbone(write(code)).fingerprint == first
    (tmp_path / "users_beside.py").write_text("VALUE = 2")
    assert find_backbone(write(code)).fingerprint != first


def test_the_fingerprint_covers_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie beside its source, and then it is what runs."""
    files = {
        "users_lib": "users_lib/__init__.cpython-311-x86_64-linux-gnu.so",
        "users_lib.net": "users_lib/net.pyc",
        "users_both": "users_both.cpython-311-x86_64-linux-gnu.so",
        "users_away": "elsewhere/users_away.pyc",
    }
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"\0" + name.encode())
    (tmp_path / "users_both.py").write_text("import users_away")
    assert imported_code("users_lib.net", ["users_both"]) == {
        "users_lib": b"\0users_lib",
        "users_lib.net": b"\0users_lib.net",
        "users_both": b"import users_away\0users_both",
    }
    assert imported_code("users_lib").keys() == {"users_lib"}


def test_the_fingerprint_covers_what_comes_out_for_a_fixed_picture(write: Write, tmp_path: Path) -> None:
    """Weights that are no parameters, in another file, would change features unnoticed."""
    body = f"return x.mean((2, 3)) * torch.tensor([float(one) for one in open({str(tmp_path / 'scale')!r}).read()])"
    found = []
    for scale in ("11111", "11111", "11191"):
        (tmp_path / "scale").write_text(scale)
        found.append(find_backbone(write(small(body))).fingerprint)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("seed", range(3))
def test_the_probe_does_not_feel_rounding(seed: int) -> None:
    """Processors round differently; changes that matter are seen."""
    torch.manual_seed(seed)
    facts = Facts(16, IMAGENET_MEAN, IMAGENET_STD, "", "")
    convolution, activation = torch.nn.Conv2d(3, 50, 3), torch.nn.ReLU()
    network = torch.nn.Sequential(convolution, activation, torch.nn.Flatten(), torch.nn.LazyLinear(99))
    first = probe(network, facts)
    assert first and first == probe(network.double().float(), facts)
    weight = convolution.weight
    for factor, same in ((1e-6, True), (0.2, False)):
        before = weight.detach().clone()
        weight.data += factor * weight.std() * torch.randn(weight.shape)
        assert (probe(network, facts) == first) is same
        weight.data = before
    assert probe(torch.nn.Flatten(0, 5), facts) == b""  # cannot be computed: said elsewhere
    assert probe(torch.nn.Unflatten(0, (BATCH, 1)), facts)  # takes full batches only


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
        (small("return x.mean((2, 3)) * 1e30"), "a number above 1e+15"),
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


def test_the_older_name_of_a_setting_is_known() -> None:
    assert facts_from("python:x:y", {"middle": 0.5}) == facts_from("python:x:y", {"centre_crop": 0.5})
