"""Pictures for tests of backbones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ablation_grids import Answer
from trident.backbones.pretrained import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    find_backbone,
)
from trident.errors import TridentError

ROOT = Path(__file__).parents[2]
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
