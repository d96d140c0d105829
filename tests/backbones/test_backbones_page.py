"""What docs/backbones.md says is true."""

import functools
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backbone_pictures import PAGE, Here, pictures
from onnx_files import small_onnx
from trident.backbones.pretrained import (
    IMAGENET_MEAN,
    find_backbone,
)


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
    for command in (["backbones"], ["data", "cache"]):
        assert trident_here(*command, "--help").returncode == 0
