"""The Prototypical Network: its numbers, and that it trains, is measured and is refused like everything else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import TINY_RECIPE, doubles, tiny_store, tiny_tasks
from trident.engines.execution import Execution, make_learner, make_model
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.audit import audit
from trident.measuring.decoupling import decoupling
from trident.measuring.evaluate import Evaluation
from trident.measuring.prediction import predict
from trident.methods.protonet import ProtoNetLearner
from trident.methods.trident.network import TaskImages

RECIPE = replace(TINY_RECIPE, model=replace(TINY_RECIPE.model, method="protonet"))


class Silent:
    def on_step(self, step: int, values: dict[str, float]) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation, best: bool) -> None: ...


def test_it_is_nothing_but_the_encoder_and_a_scale() -> None:
    keys = make_model(RECIPE).initial(0)
    assert {key.split(".")[0] for key in keys} == {"label_encoder", "classifier"}
    assert keys["classifier.scale"].shape == ()


def test_logits_are_negative_squared_distances_to_class_means() -> None:
    learner = make_learner(RECIPE, Execution())
    assert isinstance(learner, ProtoNetLearner)
    tasks, parameters = tiny_tasks(), doubles(learner.model.initial(0))
    own = {key: value.expand(2, *value.shape) for key, value in parameters.items()}
    features = learner.model.encoder(own, tasks.images.patches, learner.statistics()).flatten(2)
    n, episode = tasks.images.n_support, learner.model.episode
    (actual,) = learner.logits(parameters, tasks)
    for task in range(2):
        for way in range(episode.n_way):
            mean = features[task, :n][tasks.support_labels[task] == way].mean(0)
            expected = -parameters["classifier.scale"] * (features[task, n:] - mean).square().sum(1)
            torch.testing.assert_close(actual[task, :, way], expected)


def test_the_gradient_against_finite_differences() -> None:
    learner = make_learner(RECIPE, Execution())
    tasks, parameters = tiny_tasks(), doubles(learner.model.initial(0))
    result = learner.meta_gradient(parameters, tasks)
    generator = torch.Generator().manual_seed(1)
    along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

    def loss(distance: float) -> float:
        moved = {key: value + distance * along[key] for key, value in parameters.items()}
        return float(learner.meta_gradient(moved, tasks).loss.total.sum())

    expected = (loss(1e-6) - loss(-1e-6)) / 2e-6
    actual = float(sum((result.gradient[key] * along[key]).sum() for key in along))
    assert actual == pytest.approx(expected, rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_no_order_matters(seed: int) -> None:
    learner, tasks = make_learner(RECIPE, Execution()), tiny_tasks(seed=seed)
    parameters = doubles(learner.model.initial(0))
    n = tasks.images.n_support
    support = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    query = torch.randperm(tasks.query_labels.shape[1], generator=torch.Generator().manual_seed(seed))
    images = TaskImages(tasks.images.stored[:, torch.cat([support, n + query])], tasks.support_labels[:, support])
    other = predict(learner, parameters, tasks._replace(images=images))
    torch.testing.assert_close(other, predict(learner, parameters, tasks)[:, query])


def test_it_trains_and_is_measured(tmp_path: Path) -> None:
    store = tiny_store()
    recipe = replace(RECIPE, training=replace(RECIPE.training, steps=4, validate_every=4))
    train(start_run(recipe, store, "noise", tmp_path / "run", "cpu"), store, tmp_path / "run", "cpu", Silent())
    best = load_checkpoint(tmp_path / "run" / BEST)
    result = audit(best, store, split="test", tasks=4, seed=0)
    assert result.row("class-sorted queries").difference == pytest.approx(0, abs=1e-9)
    with pytest.raises(TridentError, match="no latents"):
        decoupling(best, store, split="test", tasks=2, seed=0)
