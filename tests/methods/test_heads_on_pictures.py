"""Golden accuracies of heads on features of real pictures. They change only if a head or the drawing of tasks does."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from trident.backbones.frozen import FrozenBackbone
from trident.data.glyphs import open_glyphs
from trident.data.prepare import prepare
from trident.data.store import ImageStore, class_table
from trident.engines.plain.heads import HeadLearner
from trident.learning.checkpoint import load_checkpoint, untrained
from trident.measuring.evaluate import evaluate
from trident.methods.base import HeadModel, HeadOnFeatures
from trident.methods.metric.nearest_mean import NearestMean
from trident.methods.transductive.bd_cspn import BdCspn
from trident.methods.transductive.bms import Bms
from trident.methods.transductive.entropy_min import EntropyMin
from trident.methods.transductive.k_reciprocal import KReciprocal
from trident.methods.transductive.laplacian_shot import LaplacianShot
from trident.methods.transductive.pt_map import PtMap
from trident.methods.transductive.tim import Tim
from trident.methods.transductive.transductive_cnaps import TransductiveCnaps
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec
from trident.tasks.task import Task

HEADS: dict[str, HeadOnFeatures] = {
    "nearest mean": NearestMean(),
    "TIM-GD": Tim(steps=200),
    "TIM-ADM": Tim("alternating", steps=50),
    "LaplacianShot": LaplacianShot(),
    "PT-MAP": PtMap(),
    "BMS": Bms(),
    "BMS*": Bms("equal"),
    "entropy minimisation": EntropyMin(),
    "k-reciprocal": KReciprocal(),
    "BD-CSPN": BdCspn(),
    "Simple CNAPS": TransductiveCnaps(0),
    "Transductive CNAPS": TransductiveCnaps(),
}


def accuracies(features: np.ndarray, classes: list[tuple[str, int]], tasks: int) -> dict[str, float]:
    """Of 5-way 1-shot tasks with 10 queries per class, for features in the order of their classes."""
    table = class_table([(name, "test", count) for name, count in classes])
    store = ImageStore("pictures", features.astype(np.float32), table, "0" * 64, "efficientnet-lite0")
    backbone, episode = FrozenBackbone(size=features.shape[1]), EpisodeSpec(5, 1, 10)
    found = {}
    for name, head in HEADS.items():
        recipe = Recipe("pictures", "", "", episode, backbone=backbone, method=head)
        found[name] = round(evaluate(untrained(recipe), store, split="test", tasks=tasks, seed=0).accuracy, 2)
    return found


def test_golden_accuracies_on_letters() -> None:
    """Features are the grey values of the letters, shrunk to 7x7 pixels."""
    glyphs = open_glyphs()
    classes = glyphs.classes_of("test")[:40]
    pixels = np.concatenate([glyphs.images[entry.start : entry.start + entry.count] for entry in classes])
    small = pixels.reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(len(pixels), 49) / 255
    found = accuracies(small, [(entry.name, entry.count) for entry in classes], 20)
    print(found)
    assert found == pytest.approx(
        {
            "nearest mean": 67.0,
            "TIM-GD": 70.6,
            "TIM-ADM": 75.0,
            "LaplacianShot": 70.0,
            "PT-MAP": 75.7,
            "BMS": 72.2,
            "BMS*": 72.4,
            "entropy minimisation": 67.2,
            "k-reciprocal": 72.8,
            "BD-CSPN": 69.5,
            "Simple CNAPS": 66.8,
            "Transductive CNAPS": 72.9,
        },
        abs=0.5,
    )


def test_golden_accuracies_on_photographs(tmp_path: Path) -> None:
    """Features of a Conv4 that was trained as a classifier, of 150 miniImageNet pictures of five validation classes."""
    folder = os.environ.get("TRIDENT_SAMPLES")
    if not folder:
        pytest.skip("TRIDENT_SAMPLES is not set: there are no real pictures to read")
    store = prepare("mini-imagenet", Path(folder) / "mini_imagenet", tmp_path / "mini.store")
    classes = store.classes_of("val")
    images = np.concatenate([store.images[entry.start : entry.start + entry.count] for entry in classes])
    trained = load_checkpoint("mini-simpleshot")
    assert isinstance(trained.recipe.model, HeadModel)
    learner = HeadLearner(trained.recipe.model, "running", trained.running)
    task = Task(torch.from_numpy(images)[None], torch.zeros(1, 0, dtype=torch.int64), 5)
    with torch.no_grad():
        features = learner.features(trained.parameters, task)[0]
    found = accuracies(features.numpy(), [(entry.name, entry.count) for entry in classes], 20)
    print(found)
    assert found == pytest.approx(
        {
            "nearest mean": 54.5,
            "TIM-GD": 66.1,
            "TIM-ADM": 67.5,
            "LaplacianShot": 63.0,
            "PT-MAP": 74.3,
            "BMS": 75.7,
            "BMS*": 75.9,
            "entropy minimisation": 50.8,
            "k-reciprocal": 65.0,
            "BD-CSPN": 62.4,
            "Simple CNAPS": 55.2,
            "Transductive CNAPS": 68.3,
        },
        abs=1.0,
    )
