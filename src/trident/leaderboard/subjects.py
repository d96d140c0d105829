"""From a row of the leaderboard to something that can be measured."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.feature_store import features_of_store
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import Pretrained
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.leaderboard.boards import Board
from trident.leaderboard.rows import Row
from trident.learning.checkpoint import Checkpoint, load_checkpoint, with_method
from trident.learning.frozen_weights import PREFIX, frozen_conv4, without_conv4
from trident.methods.base import HeadOnFeatures
from trident.progress import Progress
from trident.recipes.loading import with_overrides
from trident.settings import Protocol, Views
from trident.weights import weight_names

MEASURED = ("val", "test")  # splits: a temperature is fitted on the first


class Features:
    """Stores of features, computed once for each network. A few are kept."""

    def __init__(self, device: str, progress: Callable[[str], Progress | None] = lambda _: None, most: int = 2):
        self.device = device
        self._progress = progress
        self._most = most
        self._kept: dict[str, ImageStore] = {}

    def of(self, store: ImageStore, network: Pretrained, splits: Sequence[str]) -> ImageStore:
        if store.features_of == network.name:
            FrozenBackbone(network.name, network.n_features, fingerprint=network.network_fingerprint).check_store(store)
            return store
        key = f"{store.fingerprint} {network.fingerprint} {' '.join(splits)}"
        if key not in self._kept:
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            progress = self._progress(f"features of {store.dataset} by {network.name}")
            self._kept[key] = features_of_store(store, network, progress, splits)
        return self._kept[key]


def checkpoint_of(row: Row, board: Board) -> Checkpoint:
    """The row's weights, or its method on the features of the board's classifier, for the board's tasks."""
    if row.recipe:
        checkpoint = load_checkpoint(row.recipe)
        classifier = load_checkpoint(board.classifier)
        of = classifier.recipe.backbone
        assert isinstance(of, Conv4Backbone)
        backbone = FrozenBackbone(PREFIX + board.classifier, of.n_features, of.n_cells)
        recipe = replace(checkpoint.recipe, backbone=backbone)
        # Features are centred on the classifier's own training images, also on a board with other images.
        running = {key: classifier.running[key] for key in recipe.running_shapes()}
        checkpoint = replace(checkpoint, recipe=recipe, running=running)
    else:
        checkpoint = with_method(_trained(row.weights_on(board)), row.method)
    recipe = with_overrides(checkpoint.recipe, row.settings_for(board.episode.n_shot))
    recipe.method.check_episode(checkpoint.recipe.episode, board.episode)
    return replace(
        checkpoint, recipe=replace(recipe, episode=board.episode, views=recipe.views if row.views else Views())
    )


def _trained(name: str) -> Checkpoint:
    if name not in weight_names():
        raise TridentError(f"weights {name} are not installed: 'pip install ./packages/weights' in a clone has most")
    return load_checkpoint(name)


def under_condition(checkpoint: Checkpoint, row: Row, condition: Protocol) -> Checkpoint:
    """The weights under one of the board's conditions."""
    own = checkpoint.recipe.protocol
    protocol = replace(
        condition,
        batch_norm=row.batch_norm,  # type: ignore[arg-type]
        latents=own.latents,
        latent_samples=own.latent_samples,
    )
    return replace(checkpoint, recipe=replace(checkpoint.recipe, protocol=protocol))


def always_alone(checkpoint: Checkpoint, row: Row) -> bool:
    """Whether no query changes the answer to another, under any condition."""
    method = checkpoint.recipe.method
    return row.batch_norm == "running" and isinstance(method, HeadOnFeatures) and not method.classifies_together


def n_parameters(checkpoint: Checkpoint) -> int:
    """The number of parameters of the method and of the network that computes its features."""
    parts = [checkpoint.parameters]
    if isinstance(checkpoint.recipe.backbone, FrozenBackbone):
        whole = _frozen_weights(checkpoint.recipe.backbone)
        parts.append({key: whole.parameters[key] for key in whole.recipe.backbone.names})
    return sum(value.numel() for part in parts for value in part.values())


def with_features(
    checkpoint: Checkpoint, store: ImageStore, row: Row, features: Features, images: float = math.inf
) -> tuple[Checkpoint, ImageStore]:
    """The checkpoint and the store, on features computed beforehand if no image changes those of another.

    Predictions do not change. An image occurs in many tasks, so this saves most of the work, unless the tasks have
    fewer `images` in all than the store.
    """
    recipe = checkpoint.recipe
    if isinstance(recipe.backbone, FrozenBackbone):
        network = frozen_conv4(_frozen_weights(recipe.backbone), features.device, recipe.backbone.of)
        return checkpoint, features.of(store, network, MEASURED)
    if images < sum(entry.count for split in MEASURED for entry in store.classes_of(split)):
        return checkpoint, store
    apart = row.batch_norm == "running" and not row.views and isinstance(recipe.method, HeadOnFeatures)
    if not apart or not isinstance(recipe.backbone, Conv4Backbone):
        return checkpoint, store
    network = frozen_conv4(checkpoint, features.device)
    return without_conv4(checkpoint, network.name), features.of(store, network, MEASURED)


def _frozen_weights(backbone: FrozenBackbone) -> Checkpoint:
    return load_checkpoint(backbone.of.removeprefix(PREFIX))
