"""Trained weights as a frozen backbone: `weights:NAME` computes features with the Conv4 of these weights.

Of an ensemble, all that looks at one image alone is part of the backbone: its views, attention and damping.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trident.backbones.conv4 import conv4_of
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import INCLUDED, Compute, Facts, Pretrained, fingerprint_of
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.methods.ensemble import Ensemble
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters, for_each_task, on_device
from trident.settings import Views
from trident.tasks.task import Task
from trident.tasks.views import views_of
from trident.weights import weights_file

PREFIX = "weights:"


def load(name: str, device: str = "cpu") -> Pretrained:
    """`name` is `weights:` and a name that 'trident weights' lists, a run's folder or a weights file."""
    given: str | Path = name.removeprefix(PREFIX)
    if name == INCLUDED:  # never a file of the same name in the working directory, because nobody asked for that
        given = weights_file(str(given))
    checkpoint = load_checkpoint(given)
    of_kind = _frozen_ensemble if isinstance(checkpoint.recipe.method, Ensemble) else frozen_conv4
    return of_kind(checkpoint, device, name)


def frozen_conv4(checkpoint: Checkpoint, device: str = "cpu", name: str | None = None) -> Pretrained:
    """The Conv4 of these weights as a frozen backbone, with running statistics in batch norm."""
    name = name or f"{PREFIX}{checkpoint.recipe.name}"
    weights = _bytes_of(_of_conv4(checkpoint, name))
    return _frozen(checkpoint, name, weights, conv4_features(checkpoint, device), device)


def _frozen_ensemble(checkpoint: Checkpoint, device: str, name: str) -> Pretrained:
    """Features of an ensemble as for a pile: the mean over its views, damped. Each image has its own."""
    recipe, kept = checkpoint.recipe, _of_conv4(checkpoint, name)
    method, views = recipe.method, recipe.views
    assert isinstance(method, Ensemble)
    kept |= {key: value for key, value in sorted(checkpoint.parameters.items()) if not key.startswith("classes.")}
    maps_of, parameters = _maps(checkpoint, device), on_device(kept, device)

    def features_of(images: Tensor) -> Tensor:
        seen = [method.image_features(parameters, maps_of(view)) for view in views_of(images, views)]
        return method.damped_features(parameters, torch.stack(seen).mean(0))

    settings = f"{views.mirrored} {views.corners} {views.shifted} {method.damping}".encode()
    return _frozen(checkpoint, name, _bytes_of(kept) + settings, _on_arrays(features_of, device), device)


def without_conv4(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Take the Conv4 off these weights. They classify features that the frozen backbone `name` computed."""
    backbone = conv4_of(checkpoint.recipe.backbone, f"computing the features of {name}")
    frozen = FrozenBackbone(name, backbone.n_features, backbone.n_cells)
    statistics = backbone.initial_running()
    return replace(
        checkpoint,
        recipe=replace(checkpoint.recipe, backbone=frozen, views=Views()),
        parameters={key: value for key, value in checkpoint.parameters.items() if key not in backbone.names},
        running={key: value for key, value in checkpoint.running.items() if key not in statistics},
    )


def with_conv4(checkpoint: Checkpoint) -> Checkpoint:
    """The reverse: weights that classify features of `weights:NAME` get its Conv4. Others with a network stay as is."""
    backbone = checkpoint.recipe.backbone
    if not isinstance(backbone, FrozenBackbone):
        return checkpoint
    name = checkpoint.recipe.name
    whole = load_checkpoint(backbone.of.removeprefix(PREFIX)) if backbone.of.startswith(PREFIX) else None
    if whole is None or isinstance(whole.recipe.method, Ensemble):
        raise TridentError(
            f"weights of {name} classify stored features of {backbone.of}, not pictures: to label pictures by such "
            f"features, give the backbone {backbone.of} instead of weights"
        )
    backbone.check_fingerprint(frozen_conv4(whole).fingerprint, f"for weights of {name} there is only")
    conv4 = conv4_of(whole.recipe.backbone, f"computing the features of {backbone.of}")
    protocol = replace(checkpoint.recipe.protocol, batch_norm="running")
    return replace(
        checkpoint,
        recipe=replace(checkpoint.recipe, dataset=whole.recipe.dataset, protocol=protocol, backbone=conv4),
        parameters=checkpoint.parameters | {key: whole.parameters[key] for key in conv4.names},
        running=checkpoint.running | {key: whole.running[key] for key in conv4.initial_running()},
    )


def conv4_features(checkpoint: Checkpoint, device: str = "cpu") -> Compute:
    """A function that computes features with the Conv4 of these weights, with running statistics in batch norm."""
    return _on_arrays(_maps(checkpoint, device), device)


def _on_arrays(features_of: Callable[[Tensor], Tensor], device: str) -> Compute:
    """A function of arrays without a task axis, from one of tensors with it."""

    def compute(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(features_of(torch.from_numpy(pixels).to(device)[None])[0].cpu().numpy())

    return compute


def _maps(checkpoint: Checkpoint, device: str) -> Callable[[Tensor], Tensor]:
    """The Conv4 of these weights: images (1, image, size, size, channel) uint8 -> (1, image, feature)."""
    backbone = conv4_of(checkpoint.recipe.backbone, "computing features with these weights")
    parameters = for_each_task(on_device(checkpoint.parameters, device), 1)
    statistics = BatchNormStatistics("running", 0, on_device(checkpoint.running, device))

    def maps_of(images: Tensor) -> Tensor:
        task = Task(images, torch.zeros(1, 0, dtype=torch.int64, device=device), 1)
        return backbone(parameters, task, statistics)[0].flatten(2)

    return maps_of


def _of_conv4(checkpoint: Checkpoint, name: str) -> Parameters:
    """The parameters and statistics of the Conv4."""
    backbone = conv4_of(checkpoint.recipe.backbone, f"computing features with {name}")
    kept = {key: checkpoint.parameters[key] for key in sorted(backbone.names)}
    return kept | {key: checkpoint.running[key] for key in sorted(backbone.initial_running())}


def _frozen(checkpoint: Checkpoint, name: str, weights: bytes, compute: Compute, device: str) -> Pretrained:
    """`weights`: all that the features depend on."""
    backbone = conv4_of(checkpoint.recipe.backbone, name)
    trained_on, channels = str(checkpoint.provenance.get("dataset")), backbone.image_channels
    facts = Facts(backbone.image_size, (0.0,) * 3, (255.0,) * 3, "MIT", trained_on, channels=channels)
    return Pretrained(name, facts, backbone.n_features, fingerprint_of(facts, weights), compute, device)


def _bytes_of(parameters: Parameters) -> bytes:
    return b"".join(value.detach().cpu().numpy().tobytes() for value in parameters.values())
