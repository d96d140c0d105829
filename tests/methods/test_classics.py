"""What holds for all classic heads: gradients, extreme features, settings, golden numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from classic_tasks import LABELS, N_WAY, heads, some_task, training_batch
from head_examples import CLASSES, CLASSICS
from tiny import TINY_BACKBONE, TINY_EPISODE, check_gradient, doubles, initial
from trident.data.glyphs import open_glyphs
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.evaluate import evaluate
from trident.methods.metric.assoc_align import AssociativeAlignment
from trident.methods.metric.baseline import Baseline
from trident.methods.metric.baseline_plus_plus import BaselinePlusPlus
from trident.methods.metric.feat import Feat
from trident.methods.metric.frn import FeatureReconstruction
from trident.methods.metric.relation_network import RelationNetwork
from trident.methods.metric.s2m2 import S2M2
from trident.recipes.loading import load_recipe
from trident.tasks.task import Labels, Task


@heads
def test_gradients(name: str) -> None:
    method = CLASSICS[name]
    model = method.model(replace(TINY_BACKBONE, branches=getattr(method, "branches", 1)), TINY_EPISODE)
    check_gradient(HeadLearner(model), doubles(initial(model, 1)), training_batch(method))


@heads
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_small_and_huge_features_give_finite_logits_and_gradients(name: str, scale: float) -> None:
    method = CLASSICS[name]
    features, task = some_task(4 if method.takes_cells else 1)
    features = (scale * features if method.takes_cells else scale * features[:, :, 0]).float().requires_grad_()
    statistics = method.initial_statistics(12)
    start = method.initial(12, torch.Generator().manual_seed(0)) | {k: v + 1 for k, v in statistics.items()}
    assert method.head(start, features, task).isfinite().all()
    truth = Labels(torch.arange(task.n_queries).expand(2, -1) % N_WAY)
    if method.about.trained_on == "classes":
        task, truth = Task(features, LABELS[:, :0], CLASSES), Labels(torch.arange(12).expand(2, -1) % CLASSES)
    _, losses = method.training(start, features, task, truth)
    (slopes,) = torch.autograd.grad(losses["total"].sum(), features)
    assert slopes.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Baseline(rate=0), "method.rate is 0"),
        (lambda: Baseline(1), "method.training_classes is 1"),
        (lambda: BaselinePlusPlus(steps=-1), "method.steps is -1"),
        (lambda: RelationNetwork(width=0), "method.width is 0"),
        (lambda: Feat(temperature=0), "method.temperature is 0"),
        (lambda: FeatureReconstruction(apart=-1), "method.apart is -1"),
        (lambda: S2M2(blocks=5), "method.blocks is 5: it must be from 1 to 4"),
        (lambda: AssociativeAlignment(margin=2), "method.margin is 2"),
    ],
)
def test_settings_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        make()


GOLDEN = {  # with random weights
    "baseline": 21.6,
    "baseline-plus-plus": 40.4,
    "relation-network": 20.2,
    "feat": 39.0,
    "frn": 38.0,
    "s2m2": 40.4,
    "assoc-align": 39.6,
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_accuracies_on_letters(name: str) -> None:
    recipe = load_recipe(f"glyphs-{name}")
    start = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    found = evaluate(start, open_glyphs(), split="test", tasks=20, seed=0).accuracy
    assert found == pytest.approx(GOLDEN[name], abs=0.5)
