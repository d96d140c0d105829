"""What holds for all Bayesian heads: gradients, precision, settings, golden numbers, and their use.

What holds for all heads (orders, extreme features) is in test_heads_on_features.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayesian_heads import (
    HEADS,
    Here,
    case_of,
    heads,
    logits_of,
)
from commands import assert_one_line_error
from stores import write_store
from tiny import TINY_BACKBONE, TINY_EPISODE, doubles, initial, tiny_tasks
from trident.backbones.pretrained import find_backbone
from trident.data.glyphs import open_glyphs
from trident.data.store import class_table
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.labelling.labeller import Labeller
from trident.learning.checkpoint import Checkpoint
from trident.measuring.evaluate import evaluate
from trident.methods.base import HeadModel, HeadOnFeatures
from trident.methods.bayesian.abpml import BayesianPrototypes
from trident.methods.bayesian.dkt import DeepKernelTransfer
from trident.methods.bayesian.logistic_softmax_gp import LogisticSoftmaxProcess
from trident.methods.bayesian.metaqda import MetaQda
from trident.methods.bayesian.ove_polya_gamma import OveGaussianProcess
from trident.methods.bayesian.versa import Versa
from trident.methods.transductive.sib import SyntheticInformationBottleneck
from trident.methods.transductive.ssr import SelfSupervisedReranking
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.tasks.task import Batch


def noisy(head: HeadOnFeatures, batch: Batch, dtype: torch.dtype = torch.float64) -> Batch:
    """The batch with noise for this head."""
    generator = torch.Generator().manual_seed(3)
    shapes = head.model(TINY_BACKBONE, TINY_EPISODE).noise_shapes(TINY_EPISODE, 1)
    noise = {name: torch.randn((2, *shape), generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return Batch(replace(batch.task, noise=noise), batch.labels)


@heads
def test_the_gradient_against_finite_differences(name: str) -> None:
    """Of backbone and head. The evidences hold their inner variables fixed, so these must be at their optimum."""
    head = HEADS[name]
    model = head.model(TINY_BACKBONE, TINY_EPISODE)
    assert isinstance(model, HeadModel)
    learner, batch = HeadLearner(model), noisy(head, tiny_tasks())
    generator = torch.Generator().manual_seed(1)
    start = doubles(initial(model, 1))
    parameters = {k: v + 0.02 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in start.items()}
    found = learner.gradient(parameters, batch)
    assert found.gradient.keys() == parameters.keys()
    assert found.finite.tolist() == [True, True]
    for _ in range(2):
        along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

        def loss(distance: float, along: Parameters = along) -> float:
            moved = {key: value + distance * along[key] for key, value in parameters.items()}
            return float(learner.gradient(moved, batch).losses["total"].sum())

        actual = float(sum((found.gradient[key] * along[key]).sum() for key in along))
        errors = (abs(actual * 2 * step / (loss(step) - loss(-step)) - 1) for step in (1e-6, 1e-7))
        assert any(error < 1e-5 for error in errors)
    for key in parameters.keys() - TINY_BACKBONE.names:
        assert found.gradient[key].abs().max() > 0, key


@heads
def test_float32_is_close_to_float64(name: str) -> None:
    exact, rounded = (logits_of(HEADS[name], case_of(HEADS[name], dtype=t)) for t in (torch.float64, torch.float32))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Versa(samples=0), "method.samples is 0"),
        (lambda: Versa(initial_log_var=math.nan), "method.initial_log_var is nan"),
        (lambda: DeepKernelTransfer(noise=0), "method.noise is 0"),
        (lambda: OveGaussianProcess(rounds=0), "method.rounds is 0"),
        (lambda: LogisticSoftmaxProcess(initial_scale=-1), "method.initial_scale is -1"),
        (lambda: SyntheticInformationBottleneck(rate=0), "method.rate is 0"),
        (lambda: SelfSupervisedReranking(width=0), "method.width is 0"),
        (lambda: MetaQda(blend=1.5), "method.blend is 1.5"),
        (lambda: MetaQda(dimensions=0), "method.dimensions is 0"),
        (lambda: BayesianPrototypes(kl_weight=-1), "method.kl_weight is -1"),
    ],
)
def test_settings_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(TridentError, match=words):
        make()


GOLDEN = {
    "versa": 23.4,
    "dkt": 41.6,
    "ove-polya-gamma": 38.4,
    "logistic-softmax-gp": 38.2,
    "sib": 44.8,
    "metaqda": 36.0,
    "abpml": 33.0,
    "ssr": 33.6,
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_accuracies_on_letters(name: str) -> None:
    """Of random weights on 20 test tasks. They change only if a method, its start or the drawing of tasks does."""
    recipe = load_recipe(f"glyphs-{name}")
    start = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    found = evaluate(start, open_glyphs(), split="test", tasks=20, seed=0)
    assert found.accuracy == pytest.approx(GOLDEN[name], abs=0.6)


# Trained on a store of features, as a user does it

OF, SIZE = "weights:mini-simpleshot", 24


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with features.store: eight classes for each split, which only some of the features tell apart."""
    folder = tmp_path_factory.mktemp("features")
    generator = np.random.default_rng(5)
    centres = generator.normal(0, 1, (24, 1, SIZE)) * (np.arange(SIZE) < 12)
    rows = 0.5 + centres + generator.normal(0, 1, (24, 20, SIZE)) * np.where(np.arange(SIZE) < 12, 0.6, 1.6)
    table = class_table([(f"class {i}", ("train", "val", "test")[i // 8], 20) for i in range(24)])
    write_store(
        folder / "features.store",
        "made up",
        table,
        iter(rows.reshape(-1, SIZE).astype(np.float32)),
        OF,
        find_backbone(OF).fingerprint,
    )
    return folder


@pytest.mark.parametrize(("name", "steps", "gain"), [("sib", 60, 10.0), ("metaqda", 60, 10.0), ("ssr", 60, 2.0)])
def test_they_are_trained_on_frozen_features(
    name: str, steps: int, gain: float, features: Path, monkeypatch: pytest.MonkeyPatch, trident_here: Here
) -> None:
    monkeypatch.chdir(features)
    size = [f"backbone.size={SIZE}", "episode.n_query=6", "training.rate=0.01", "tasks_per_step=4"]
    size += ["validation_tasks=5"]
    size += {"metaqda": ["method.dimensions=12"], "ssr": ["method.rate=0.01", "training.rate=0.001"]}.get(name, [])

    def accuracy(after: int) -> float:
        call = ("train", f"mini-5w1s-{name}", "--data", "features.store", "--out", f"{name} {after}", "--device", "cpu")
        done = trident_here(*call, *size, f"training.steps={after}", f"validate_every={after}", f"save_every={after}")
        assert done.returncode == 0, done.stderr
        again = ("evaluate", f"{name} {after}", "--data", "features.store", "--tasks", 60, "--json", "--device", "cpu")
        found = trident_here(*again)
        assert found.returncode == 0, found.stderr
        return float(json.loads(found.stdout)["accuracy"])

    before, after = accuracy(1), accuracy(steps)
    assert after > before + gain
    run = ("evaluate", f"{name} {steps}", "--data", "features.store", "--tasks", 2)
    ways = trident_here(*run, "episode.n_way=4")
    queries, alone = trident_here(*run, "episode.n_query=5"), trident_here(*run, "protocol.queries_at_once=one")
    if name == "metaqda":
        assert (ways.returncode, queries.returncode, alone.returncode) == (0, 0, 0)
        return
    assert_one_line_error(ways, "these weights classify 5 ways, not 4")
    if name == "ssr":
        assert_one_line_error(queries, "these weights take 30 queries in a task (6 queries per class), not 25")
        assert_one_line_error(alone, "classify as many queries at once as in training")


# In use on pictures


@pytest.mark.parametrize("name", list(GOLDEN))
def test_a_pile_of_pictures_is_labelled(name: str) -> None:
    """With different numbers of labelled pictures, many pictures together and one alone. SSR takes no pile."""
    recipe = load_recipe(f"glyphs-{name}")
    start = Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)
    store = open_glyphs()
    pictures, labels = np.asarray(store.images[:31]), np.array([0, 1, 1, 2, 3, 3, 3, 4])
    if name == "ssr":
        with pytest.raises(TridentError, match="take 25 queries in a task"):
            Labeller(start, tuple("abcde"), pictures[:8], labels)
        return
    labeller = Labeller(start, tuple("abcde"), pictures[:8], labels)
    for pile in (pictures[8:], pictures[8:9]):
        found = labeller.probabilities(pile)
        assert found.shape == (len(pile), 5)
        np.testing.assert_allclose(found.sum(1), 1)
