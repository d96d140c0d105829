"""What holds for every method that is a head on features; the trained ones have random weights here."""

from functools import partial
from typing import Literal

import numpy as np
import pytest

import made_up_features
from head_examples import CLASS_SLOTS, GOLDEN, HEADS
from made_up_features import N_QUERIES, N_WAY, logits_of, probabilities
from trident.backbones.frozen import FrozenBackbone
from trident.data.store import ImageStore, class_table
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint, untrained
from trident.measuring.evaluate import evaluate
from trident.methods.base import HeadOnFeatures
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol

some_features = partial(made_up_features.some_features, n_queries=N_QUERIES)
heads = pytest.mark.parametrize("name", list(HEADS))


@heads
def test_the_order_of_the_queries_does_not_matter(name: str) -> None:
    features, labels = some_features()
    n = labels.shape[1]
    order = np.random.default_rng(1).permutation(features.shape[1] - n)
    one = probabilities(logits_of(HEADS[name], features, labels))
    other = probabilities(
        logits_of(HEADS[name], np.concatenate([features[:, :n], features[:, n:][:, order]], 1), labels)
    )
    np.testing.assert_allclose(other, one[:, order], atol=1e-6)


@heads
def test_the_order_of_the_classes_and_of_the_support_images_does_not_matter(name: str) -> None:
    features, labels = some_features()
    n = labels.shape[1]
    generator = np.random.default_rng(2)
    renamed, order = generator.permutation(N_WAY), generator.permutation(n)
    one = probabilities(logits_of(HEADS[name], features, labels))
    other = probabilities(
        logits_of(
            HEADS[name], np.concatenate([features[:, :n][:, order], features[:, n:]], 1), renamed[labels][:, order]
        )
    )
    # scikit-learn stops at a tolerance of its own, and where votes are equal the order decides.
    tolerance = 1e-3 if name == "logistic regression" else 1e-6
    assert np.allclose(other[:, :, renamed], one, rtol=0, atol=tolerance) != (name in CLASS_SLOTS)


@heads
def test_tasks_do_not_see_each_other(name: str) -> None:
    features, labels = some_features(3)
    one = probabilities(logits_of(HEADS[name], features, labels))
    alone = probabilities(logits_of(HEADS[name], features[1:2], labels[1:2]))
    np.testing.assert_allclose(one[1:2], alone, atol=1e-6)


@heads
def test_queries_are_seen_alone_unless_the_method_says_otherwise(name: str) -> None:
    features, labels = some_features(1)
    n, head = labels.shape[1], HEADS[name]
    together = probabilities(logits_of(head, features, labels))
    assert not head.for_few_queries().classifies_together
    if name == "SSR":
        with pytest.raises(TridentError, match="as many queries at once as in training"):
            logits_of(head, features[:, : n + 1], labels)
        return
    alone = probabilities(logits_of(head, features[:, : n + 1], labels))
    assert np.allclose(together[:, :1], alone, atol=1e-6) != head.classifies_together


@heads
def test_extreme_features_give_finite_logits(name: str) -> None:
    features, labels = some_features(1)
    features[0, 0] = 0  # a labelled picture without any feature
    features[0, -1] = 0
    features[0, -2] = 1e15 * features[0, -3]
    features[0, -4] = features[0, 3]  # the same as a labelled one
    assert np.isfinite(logits_of(HEADS[name], features, labels)).all()
    assert np.isfinite(logits_of(HEADS[name], features.astype(np.float32), labels)).all()
    same = np.broadcast_to(features[:, 1:2], features.shape).copy()  # all pictures are the same
    assert np.isfinite(logits_of(HEADS[name], same.astype(np.float32), labels)).all()


# On a store of features


def made_up_store(n_features: int = 40) -> ImageStore:
    """Twelve classes of 30 images each, at unequal distances from each other."""
    generator = np.random.default_rng(12)
    centres = generator.normal(0.6, 1, (12, n_features))
    features = np.repeat(centres, 30, 0) + generator.normal(0, 1.6, (360, n_features))
    table = class_table([(f"class {c}", "test", 30) for c in range(12)])
    return ImageStore("made up", features.astype(np.float32), table, "0" * 64, "efficientnet-lite0")


Balance = Literal["dirichlet", "balanced", "one_absent"]
BALANCES: tuple[Balance, ...] = ("dirichlet", "balanced", "one_absent")


def accuracy_of(head: HeadOnFeatures, balance: Balance) -> float:
    store = made_up_store()
    protocol = Protocol(balance=balance, dirichlet_alpha=1.0)
    backbone = FrozenBackbone(size=store.images.shape[1])
    recipe = Recipe("made up", "", "", EpisodeSpec(5, 2, 10), protocol=protocol, backbone=backbone, method=head)
    with_random_weights = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    checkpoint = untrained(recipe) if head.about.trained_on == "nothing" else with_random_weights
    return evaluate(checkpoint, store, split="test", tasks=40, seed=0).accuracy


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_accuracies(name: str) -> None:
    """Balanced, and with unknown class sizes. They change only if a head, or the drawing of tasks, does."""
    found = (accuracy_of(HEADS[name], "balanced"), accuracy_of(HEADS[name], "dirichlet"))
    assert found == pytest.approx(GOLDEN[name], abs=0.3)


def test_learned_class_sizes_are_better_where_sizes_are_unequal_and_no_worse_where_they_are_not() -> None:
    gains = [
        accuracy_of(SoftKMeans(), balance) - accuracy_of(SoftKMeans(class_sizes="equal"), balance)
        for balance in BALANCES
    ]
    assert gains[0] > 1
    assert min(gains[1:]) > -0.5


def test_a_recipe_that_needs_no_training_is_a_checkpoint() -> None:
    checkpoint = load_checkpoint("features-soft-kmeans")
    assert checkpoint.parameters == {}
    assert checkpoint.describe() == "recipe features-soft-kmeans, not trained"
    with pytest.raises(TridentError, match="glyphs must be trained first: trident train glyphs"):
        untrained(load_recipe("glyphs"))
