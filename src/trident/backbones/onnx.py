"""`onnx:FILE`: a backbone from an ONNX file, run by onnxruntime.

The network must have one input (picture, 3, size, size) and, as its first output, features (picture, feature). How
pixels are scaled is not in an ONNX file. If it is not the usual way of networks trained on ImageNet, write it into a
TOML file of the same name beside it, `dinov2.toml` beside `dinov2.onnx`:

    image_size = 224             # only needed if the input has no fixed size
    centre_crop = 1.0            # the part of a picture's centre square that it looks at
    mean = [123.7, 116.3, 103.5] # of pixels from 0 to 255
    std = [58.4, 57.1, 57.4]
    licence = "Apache-2.0"
    trained_on = "LVD-142M"
"""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.pretrained import (
    BATCH,
    INSTALL_ONNX,
    Compute,
    Facts,
    Pretrained,
    check_output,
    fingerprint_of,
    short_message,
)
from trident.backbones.python_function import OLD_CROP, SETTINGS, facts_from
from trident.errors import TridentError
from trident.files import MOST_WEIGHTS, read_regular

_EXTERNAL_DATA = b"\x0a\x08location"  # how the file says that weights are in another file
_OUTPUTS = ("tensor(float)", "tensor(float16)", "tensor(double)")


def load(name: str, device: str) -> Pretrained:
    path = Path(name.removeprefix("onnx:"))
    weights = read_regular(path, MOST_WEIGHTS)
    if _EXTERNAL_DATA in weights:
        # The fingerprint would not cover them, and onnxruntime would look for them in the current folder.
        raise TridentError(
            f"{path} keeps its weights in another file: save all in one, in torch.onnx.export with external_data=False"
        )
    settings = _settings(path.with_suffix(".toml"))
    session = _session(name, weights, device)
    size, batch = _input_size(name, session, settings)
    facts = facts_from(name, settings | {"image_size": size})
    output = session.get_outputs()[0]
    if output.type not in _OUTPUTS:
        raise TridentError(f"backbone {name} gives {output.type}: its first output must be tensor(float)")
    compute = _compute(session, facts, batch)
    try:
        features = compute(np.zeros((BATCH, size, size, 3), np.uint8))
    except Exception as error:  # onnxruntime's own exceptions
        raise TridentError(f"backbone {name} cannot take {size}x{size} pictures: {short_message(error)}") from error
    return Pretrained(name, facts, check_output(name, features), fingerprint_of(facts, weights), compute, device)


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = tomllib.loads(read_regular(path).decode())
    except ValueError as error:
        raise TridentError(f"cannot read {path}: {error}") from error
    unknown = [key for key in settings if key not in (*SETTINGS, OLD_CROP)]
    if unknown:
        raise TridentError(f"{path}: unknown setting '{unknown[0]}'; there are {', '.join(SETTINGS)}")
    return settings


def _session(name: str, weights: bytes, device: str) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise TridentError(f"backbone {name} needs onnxruntime: {INSTALL_ONNX}") from error
    providers = ["CUDAExecutionProvider"] if device.startswith("cuda") else []
    usable = [provider for provider in providers if provider in onnxruntime.get_available_providers()]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors come as exceptions too
    try:
        return onnxruntime.InferenceSession(weights, options, [*usable, "CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions
        file = name.removeprefix("onnx:")
        raise TridentError(f"{file} is not an ONNX file that can be run: {short_message(error)}") from error


def _input_size(name: str, session: Any, settings: dict[str, Any]) -> tuple[Any, int | None]:
    """The size of pictures, and the number of pictures in a batch if the network fixes it."""
    inputs = session.get_inputs()
    shape = list(inputs[0].shape) if inputs else []
    if len(inputs) != 1 or len(shape) != 4 or shape[1] != 3 or inputs[0].type != "tensor(float)":
        described = " and ".join(f"{one.type} {one.shape}" for one in inputs) or "nothing"
        raise TridentError(
            f"backbone {name} takes {described}: it must have one input, tensor(float) ['picture', 3, size, size]"
        )
    batch, _, *sides = (side if isinstance(side, int) else None for side in shape)
    fixed = {side for side in sides if side is not None}
    if len(fixed) > 1:
        raise TridentError(f"backbone {name} takes pictures of {sides[0]}x{sides[1]}: they must be square")
    wanted = settings.get("image_size")
    if not fixed:
        return 224 if wanted is None else wanted, batch
    (side,) = fixed
    if wanted not in (None, side):
        raise TridentError(f"backbone {name} takes pictures of {side}x{side}, but its settings say {wanted}")
    return side, batch


def _compute(session: Any, facts: Facts, batch: int | None) -> Compute:
    entry = session.get_inputs()[0].name
    at_once = batch or BATCH
    mean, std = (np.array(values, np.float32).reshape(1, 3, 1, 1) for values in (facts.mean, facts.std))

    def compute(pixels: np.ndarray) -> np.ndarray:
        scaled = (np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).astype(np.float32) - mean) / std
        missing = -len(scaled) % at_once  # to fill the last batch of a network that fixes its size
        scaled = np.concatenate([scaled, np.zeros((missing, *scaled.shape[1:]), np.float32)])
        parts = np.split(scaled, len(scaled) // at_once)
        features = [np.asarray(session.run(None, {entry: part})[0], np.float32) for part in parts]
        if features[0].ndim == 0 or len(features[0]) != at_once:
            return features[0]  # of the wrong shape, which `check_output` reports
        return np.concatenate(features)[: len(pixels)]

    return compute
