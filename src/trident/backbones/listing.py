"""Facts about the backbones, for lists."""

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from trident.backbones.pretrained import BACKBONES, INCLUDED, INSTALL, INSTALL_ONNX, find_backbone

CONV4 = {
    "name": "conv4",
    "image_size": 84,
    "features": 800,
    "licence": "MIT",
    "trained_on": "your data, or miniImageNet (the included weights)",
    "installed": True,
    "install": None,
}
ENSEMBLE = CONV4 | {"features": 4800, "trained_on": "miniImageNet's 64 training classes"}


def listed() -> list[dict[str, Any]]:
    """Facts about all backbones, without loading them."""
    known = [
        {
            "name": name,
            "image_size": listed.facts.image_size,
            "features": listed.n_features,
            "licence": listed.facts.licence,
            "trained_on": listed.facts.trained_on,
            "installed": listed.installed,
            "install": INSTALL,
        }
        for name, listed in BACKBONES.items()
    ]
    of_the_user = dict.fromkeys(("image_size", "features", "licence", "trained_on"))
    onnx = {"name": "onnx:FILE", **of_the_user, "installed": find_spec("onnxruntime") is not None}
    python = {"name": "python:package.module:function", **of_the_user, "installed": True}
    return [
        dict(CONV4),
        *known,
        ENSEMBLE | {"name": INCLUDED},
        onnx | {"install": INSTALL_ONNX},
        python | {"install": None},
    ]


def examined(name: str) -> dict[str, Any]:
    """Facts about one backbone, which is loaded."""
    if name == "conv4":
        return dict(CONV4)
    found = find_backbone(name)
    return {"name": name, "features": found.n_features, **asdict(found.facts), "fingerprint": found.fingerprint}
