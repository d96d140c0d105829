"""The Prototypical Network: its numbers, and that it trains, is measured and is refused like everything else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import TINY_RECIPE, Silent, doubles, tiny_store, tiny_tasks
from trident.engines.execution import Execution, make_learner
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.audit import audit
from trident.measuring.decoupling import decoupling
from trident.measuring.evaluate import validate
from trident.measuring.prediction import predict
from trident.methods.metric.protonet import ProtoNet
from trident.tasks.task import Task

RECIPE = replace(TINY_RECIPE, method=ProtoNet())


def test_it_is_nothing_but_the_encoder_and_a_scale() -> None:
    keys = RECIPE.initial(0)
    assert {key.split(".")[0] for key in keys} == {"backbone", "scale"}
    assert keys["scale"].shape == ()


def test_logits_are_negative_squared_distances_to_class_means() -> None:
    learner = make_learner(RECIPE, Execution())
    assert isinstance(learner, HeadLearner)
    task, parameters = tiny_tasks().task, doubles(RECIPE.initial(0))
    features = learner.features(parameters, task)
    n = task.n_support
    actual = learner.model.method.head(parameters, features, task)
    for index in range(2):
        for way in range(task.n_way):
            mean = features[index, :n][task.support_labels[index] == way].mean(0)
            expected = -parameters["scale"] * (features[index, n:] - mean).square().sum(1)
            torch.testing.assert_close(actual[index, :, way], expected)
    torch.testing.assert_close(learner.log_probabilities(parameters, task), torch.log_softmax(actual, 2))


def test_the_gradient_against_finite_differences() -> None:
    learner = make_learner(RECIPE, Execution())
    batch, parameters = tiny_tasks(), doubles(RECIPE.initial(0))
    result = learner.gradient(parameters, batch)
    generator = torch.Generator().manual_seed(1)
    along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

    def loss(distance: float) -> float:
        moved = {key: value + distance * along[key] for key, value in parameters.items()}
        return float(learner.gradient(moved, batch).losses["total"].sum())

    expected = (loss(1e-6) - loss(-1e-6)) / 2e-6
    actual = float(sum((result.gradient[key] * along[key]).sum() for key in along))
    assert actual == pytest.approx(expected, rel=1e-6)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_no_order_matters(seed: int) -> None:
    learner, task = make_learner(RECIPE, Execution()), tiny_tasks(seed=seed).task
    parameters = doubles(RECIPE.initial(0))
    n = task.n_support
    support = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    query = torch.randperm(task.n_queries, generator=torch.Generator().manual_seed(seed))
    other = Task(task.images[:, torch.cat([support, n + query])], task.support_labels[:, support], task.n_way)
    torch.testing.assert_close(predict(learner, parameters, other), predict(learner, parameters, task)[:, query])


def test_it_trains_and_is_measured(tmp_path: Path) -> None:
    store = tiny_store()
    recipe = replace(RECIPE, training=replace(RECIPE.training, steps=4, validate_every=4))
    start = start_run(recipe, store, "noise", tmp_path / "run", "cpu")
    train(start, store, tmp_path / "run", "cpu", Silent(), validate)
    best = load_checkpoint(tmp_path / "run" / BEST)
    result = audit(best, store, split="test", tasks=4, seed=0)
    row = result.row("class-sorted queries")
    assert row is not None
    assert row.difference == pytest.approx(0, abs=1e-9)
    with pytest.raises(TridentError, match="no latents"):
        decoupling(best, store, split="test", tasks=2, seed=0)
