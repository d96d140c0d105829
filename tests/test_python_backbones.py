"""Backbones that are Python functions of the user."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

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
