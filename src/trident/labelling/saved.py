"""Saved classifiers: the features of the labelled pictures, their labels, which backbone made them, and the weights of
the label latents, if there are any.

The file is a safetensors file, which runs no code when it is read. It holds no pictures. A checksum covers everything
in it, and the backbone's fingerprint makes sure that features of another network are never compared with it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trident.backbones.pretrained import BACKBONES, INCLUDED, Pretrained, find_backbone
from trident.errors import TridentError
from trident.files import write_file
from trident.labelling.class_names import class_name
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.label_latents import LabelLatents
from trident.learning.checkpoint import digest_of
from trident.methods.trident.features import TridentOnFeatures
from trident.nn.parameters import Parameters
from trident.recipes.loading import method_from

SUFFIX = ".trident"
_FORMAT = "trident-classifier-3"
_FORMATS = (_FORMAT, "trident-classifier-2")  # that one also names settings of soft k-means, always the same ones
_LATENTS = "latents/"  # how the names of their weights begin
_LARGEST_WEIGHT = 1e4  # larger ones may overflow
_MOST_TRUST = 1000.0
_MOST_BYTES = 2**31
_MOST_CLASSES = 100_000
_LONGEST_NAME = 1000  # of a backbone


def save_classifier(labeller: FeatureLabeller, path: Path) -> None:
    """Write a classifier. The file appears only when it is complete."""
    if path.suffix != SUFFIX:
        raise TridentError(f"{path}: the file of a classifier must end in {SUFFIX}")
    if labeller.method is not None:
        raise TridentError(f"a classifier with the method {labeller.method.about.title} cannot be saved")
    latents = labeller.latents
    tensors = {"features": np.ascontiguousarray(labeller.features), "labels": np.ascontiguousarray(labeller.labels)}
    tensors |= {_LATENTS + key: value.numpy() for key, value in (latents.parameters if latents else {}).items()}
    about = {
        "classes": list(labeller.classes),
        "backbone": labeller.backbone.name,
        "fingerprint": labeller.backbone.fingerprint,
        "latents": asdict(latents.method) if latents else None,
    }
    text = json.dumps(about, sort_keys=True)
    metadata = {"format": _FORMAT, "trident": text, "checksum": digest_of(text, tensors)}
    write_file(path, save(tensors, metadata))


def load_classifier(
    path: Path, device: str = "cpu", backbone: str | None = None, cache: FeatureCache | None = None
) -> FeatureLabeller:
    """Read a classifier. `backbone`: its name, which must be given again if it is a file or a Python function."""
    about, tensors = _read(path)
    try:
        classes = tuple(class_name(name) for name in about["classes"])
        features, labels = tensors["features"], tensors["labels"]
        name, fingerprint = str(about["backbone"])[:_LONGEST_NAME], str(about["fingerprint"])
        fits = (
            features.ndim == 2
            and features.dtype == np.float32
            and labels.shape == features.shape[:1]
            and labels.dtype == np.int64
            and 0 < len(classes) <= _MOST_CLASSES
            and len(set(classes)) == len(classes)
            and len(labels) > 0
            and 0 <= labels.min() <= labels.max() < len(classes)
            and bool(np.isfinite(features).all())
        )
        latents = _latents(about["latents"], tensors, features.shape[-1])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, TridentError) as error:
        raise TridentError(f"{path} is not a classifier of trident: {error}") from error
    if not fits:
        raise TridentError(f"{path} is damaged: its features, labels and classes do not fit together")
    network = _backbone(path, name, fingerprint, backbone, device)
    if features.shape[1] != network.n_features:
        raise TridentError(f"{path} is damaged: its features do not fit {network.name}")
    try:
        return FeatureLabeller(network, classes, features, labels, latents, cache=cache)
    except TridentError as error:
        raise TridentError(f"{path} is damaged: {error}") from error


def _latents(settings: dict[str, Any] | None, tensors: dict[str, np.ndarray], n_features: int) -> LabelLatents | None:
    stored = {key: torch.from_numpy(value) for key, value in tensors.items() if key not in ("features", "labels")}
    expected: Parameters = {}
    method = None
    if settings is not None:
        method = cast(TridentOnFeatures, method_from("trident-features", settings))
        if method.mask_from != "support" or max(-method.trust_from, method.trust_to) > _MOST_TRUST:
            raise ValueError("the settings of its label latents are not those of trained ones")
        with torch.device("meta"):  # shapes without values, however large the settings want them
            expected = method.initial(n_features, torch.Generator()) | method.initial_statistics(n_features)
    for key in sorted(stored.keys() ^ {_LATENTS + key for key in expected}):
        raise ValueError(f"'{key}' is {'unexpected' if key in stored else 'missing'}")
    for key, wanted in expected.items():
        own = stored[_LATENTS + key]
        if own.shape != wanted.shape or own.dtype != wanted.dtype:
            raise ValueError(f"the weights '{key}' of its label latents do not fit their settings")
        if not bool((own.abs() <= _LARGEST_WEIGHT).all()):
            raise ValueError(f"the weights '{key}' of its label latents are too large, or no numbers")
    return LabelLatents(method, {key: stored[_LATENTS + key] for key in expected}) if method else None


def _backbone(path: Path, name: str, fingerprint: str, given: str | None, device: str) -> Pretrained:
    """The backbone that a file names. Nothing that the file alone names is ever run or read."""
    if given is None and name not in (*BACKBONES, INCLUDED):
        raise TridentError(f"{path} was made with backbone {name}: if you trust it, give --backbone {name}")
    network = find_backbone(given or name, device)
    if network.fingerprint != fingerprint:
        raise TridentError(
            f"{path} was made with backbone {name} of fingerprint {fingerprint[:12]}: "
            f"{network.name} has the fingerprint {network.fingerprint[:12]}, so its features do not fit"
        )
    return network


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.is_file():
        what = f"{path} is a folder, not a classifier" if path.is_dir() else f"there is no classifier at {path}"
        raise TridentError(f"{what}: make one with 'trident fit'")
    if path.stat().st_size > _MOST_BYTES:
        raise TridentError(f"{path} is larger than {_MOST_BYTES // 2**30} GiB, too large for a classifier")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
        raise TridentError(f"{path} is not a classifier of trident: {error}") from error
    if metadata.get("format") not in _FORMATS:
        raise TridentError(f"{path} is not a classifier of this version of trident: make it again with 'trident fit'")
    text = metadata.get("trident", "")
    if metadata.get("checksum") != digest_of(text, tensors):
        raise TridentError(f"{path} has been changed since it was written: its checksum does not match")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TridentError(f"{path} is not a classifier of trident: {error}") from error
    return about, tensors
