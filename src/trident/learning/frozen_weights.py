"""Trained weights as a frozen backbone: `weights:NAME` computes features with the Conv4 of these weights."""

from dataclasses import replace

import numpy as np
import torch

from trident.backbones.conv4 import Conv4Backbone, conv4_of
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import Compute, Facts, Pretrained, fingerprint_of
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.methods.ensemble import Ensemble
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import for_each_task, on_device
from trident.settings import Views
from trident.tasks.task import Task

PREFIX = "weights:"


def load(name: str, device: str = "cpu") -> Pretrained:
    """`name` is `weights:` and a name that 'trident weights' lists, a run's folder or a weights file."""
    checkpoint = load_checkpoint(name.removeprefix(PREFIX))
    method = checkpoint.recipe.method
    if isinstance(method, Ensemble) and method.attention:
        raise TridentError(
            f"{name}: attention makes the features of these weights, not Conv4 alone; use --method ensemble"
        )
    return frozen_conv4(checkpoint, device, name)


def frozen_conv4(checkpoint: Checkpoint, device: str = "cpu", name: str | None = None) -> Pretrained:
    """The Conv4 of these weights as a frozen backbone, with running statistics in batch norm."""
    backbone = checkpoint.recipe.backbone
    name = name or f"{PREFIX}{checkpoint.recipe.name}"
    if not isinstance(backbone, Conv4Backbone):
        raise TridentError(f"{name} has no Conv4 that could compute features: it takes {backbone.describe()}")
    facts = Facts(backbone.image_size, (0.0,) * 3, (255.0,) * 3, "MIT", str(checkpoint.provenance.get("dataset")))
    kept = {key: checkpoint.parameters[key] for key in sorted(backbone.names)}
    kept |= {key: checkpoint.running[key] for key in sorted(backbone.initial_running())}
    fingerprint = fingerprint_of(facts, b"".join(value.detach().cpu().numpy().tobytes() for value in kept.values()))
    return Pretrained(name, facts, backbone.n_features, fingerprint, conv4_features(checkpoint, device), device)


def without_conv4(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The same weights without their Conv4. They classify features that the frozen backbone `name` computed."""
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
    """The reverse: weights that classify features of `weights:NAME` get its Conv4, so that they classify pictures.

    Other weights are returned unchanged.
    """
    backbone = checkpoint.recipe.backbone
    if not isinstance(backbone, FrozenBackbone) or not backbone.of.startswith(PREFIX):
        return checkpoint
    whole = load_checkpoint(backbone.of.removeprefix(PREFIX))
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
    backbone = conv4_of(checkpoint.recipe.backbone, "computing features with these weights")
    parameters = for_each_task(on_device(checkpoint.parameters, device), 1)
    statistics = BatchNormStatistics("running", 0, on_device(checkpoint.running, device))

    def compute(pixels: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(pixels).to(device)[None]  # (1, image, size, size, channel)
        task = Task(images, torch.zeros(1, 0, dtype=torch.int64, device=device), 1)
        with torch.no_grad():
            maps, _ = backbone(parameters, task, statistics)
        return np.asarray(maps.flatten(2)[0].cpu().numpy())

    return compute
