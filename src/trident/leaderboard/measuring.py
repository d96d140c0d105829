"""Measures one row on one board."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.feature_store import features_of_store
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import Pretrained
from trident.data.store import ImageStore, class_table, new_hash
from trident.engines.execution import device_name
from trident.files import short_digest
from trident.leaderboard.results import Results
from trident.leaderboard.rows import CONDITIONS, FEWER_TASKS_ALONE, Board, Row
from trident.learning.checkpoint import Checkpoint, load_checkpoint, with_method
from trident.learning.frozen_weights import PREFIX, frozen_conv4, without_conv4
from trident.measuring.calibration import calibration, fit_temperature
from trident.measuring.evaluate import Evaluation, evaluate
from trident.methods.base import HeadOnFeatures
from trident.progress import Progress
from trident.recipes.loading import with_overrides
from trident.settings import Protocol, Views, require
from trident.weights import weight_names

MEASURED = ("val", "test")  # splits: a temperature is fitted on the first
Stage = Callable[[str], Progress | None]  # from what is being done to a progress bar for it


class Features:
    """Stores of features, computed once for each network. The last two are kept."""

    def __init__(self, device: str, stage: Stage = lambda _: None):
        self.device = device
        self._stage = stage
        self._kept: dict[str, ImageStore] = {}

    def of(self, store: ImageStore, network: Pretrained, splits: Sequence[str]) -> ImageStore:
        if store.features_of == network.name:
            FrozenBackbone(network.name, network.n_features, fingerprint=network.network_fingerprint).check_store(store)
            return store
        key = f"{store.fingerprint} {network.fingerprint} {' '.join(splits)}"
        if key not in self._kept:
            if len(self._kept) == 2:
                del self._kept[next(iter(self._kept))]
            progress = self._stage(f"features of {store.dataset} by {network.name}")
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
        name = row.weights_on(board)
        how = "'pip install ./packages/weights' in a clone has most"
        require(name in weight_names(), f"weights {name} are not installed: {how}")
        checkpoint = with_method(load_checkpoint(name), row.method)
    recipe = with_overrides(checkpoint.recipe, row.settings_for(board.episode.n_shot))
    recipe.method.check_episode(checkpoint.recipe.episode, board.episode)
    return replace(
        checkpoint, recipe=replace(recipe, episode=board.episode, views=recipe.views if row.views else Views())
    )


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
    """With features computed beforehand where that changes no prediction and saves work."""
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


FITTING_TASKS = 200


def measure(
    row: Row,
    board: Board,
    store: ImageStore,
    fitting_store: ImageStore,
    features: Features,
    tasks: int,
    device: str,
    stage: Stage = lambda _: None,
) -> Results:
    """The results by condition. One temperature is fitted, on balanced validation tasks of `fitting_store`."""
    whole = checkpoint_of(row, board)
    method = whole.recipe.method
    always_alone = row.batch_norm == "running" and isinstance(method, HeadOnFeatures) and not method.classifies_together
    images = tasks * board.episode.n_images * (1 + len(board.conditions))

    def evaluated(where: ImageStore, condition: str, split: str, n_tasks: int) -> Evaluation:
        checkpoint, seen = with_features(whole, where, row, features, images)
        checkpoint = under_condition(checkpoint, row, CONDITIONS[condition])
        progress = stage(f"{row.name}, {board.name}, {condition if split == 'test' else 'temperature'}")
        return evaluate(checkpoint, seen, progress=progress, split=split, tasks=n_tasks, seed=0, device=device)

    fitting = evaluated(fitting_store, "balanced", "val", min(FITTING_TASKS, tasks))
    temperature = fit_temperature(fitting.predictions)
    with_features(whole, store, row, features, images)  # so that computing features is not timed
    # Other programs change the time that passes, but hardly the time that a CPU computes.
    clock = time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    path = whole.path
    file = {"file": path.name, "digest": short_digest(path)} if path else {"file": None, "digest": None}
    results = {}
    for condition in board.conditions:
        if condition == "alone" and not method.any_queries:
            continue
        n_tasks = max(2, tasks // FEWER_TASKS_ALONE) if condition == "alone" else tasks
        # A method that classifies each query alone anyway gives the same answers to all at once, in less time.
        alone = condition == "alone" and always_alone
        began = clock()
        result = evaluated(store, "balanced" if alone else condition, "test", n_tasks)
        seconds = clock() - began
        results[condition] = result.record(
            described=result.describe_protocol() + (", each query alone" if alone else ""),
            protocol={},  # the board and the row say it
            data=fingerprint_of_test_classes(store),
            # What was measured, so that results can be told from those of other weights or settings.
            weights=whole.summary() | file | {"method": asdict(method)},
            parameters=n_parameters(whole),
            milliseconds=1000 * seconds / n_tasks,
            execution=asdict(result.execution) | {"device": device_name(device)},
            calibration={"validation": calibration(result.predictions, temperature).figures()},
        )
    return results


def fingerprint_of_test_classes(store: ImageStore) -> str:
    """What decides which tasks are drawn: the same for every store with these test classes, whatever else it holds."""
    own = ((entry.name, entry.split, entry.count) for entry in store.classes_of("test"))
    return str(new_hash(class_table(own)).hexdigest()[:12])
