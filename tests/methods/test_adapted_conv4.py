"""What predictions of MAML and its relatives depend on, and the whole library with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapted_conv4 import METHODS, RANDOM_WEIGHTS, learner_of, methods, tasks_for
from tiny import TINY_EPISODE, TINY_RECIPE, Silent, doubles, tiny_store
from trident.backbones.frozen import FrozenBackbone
from trident.data.glyphs import open_glyphs
from trident.engines.execution import Execution, make_learner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.errors import TridentError
from trident.labelling.labeller import Labeller
from trident.learning.checkpoint import load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.step_gradient import training_source
from trident.learning.training import train
from trident.measuring.evaluate import evaluate, validate
from trident.measuring.prediction import predict_one_by_one
from trident.methods.inner_loop.abml import Abml
from trident.methods.inner_loop.base import Inputs
from trident.methods.inner_loop.bmaml import BayesianMaml
from trident.methods.inner_loop.maml import Maml
from trident.methods.inner_loop.platipus import Platipus
from trident.methods.inner_loop.vampire import Vampire
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.task import Batch, Labels, Task, queries_alone


@methods
@pytest.mark.parametrize("batch_norm", ["transductive", "support", "running"])
def test_the_order_of_images_changes_nothing(name: str, batch_norm: str) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner, predictions=2).task
    generator = torch.Generator().manual_seed(1)
    support = torch.randperm(task.n_support, generator=generator)
    query = torch.randperm(task.n_queries, generator=generator)
    images = task.images[:, torch.cat([support, task.n_support + query])]
    other = Task(images, task.support_labels[:, support], task.n_way, task.noise)
    expected = learner.log_probabilities(parameters, task)[:, query]
    torch.testing.assert_close(learner.log_probabilities(parameters, other), expected, rtol=1e-8, atol=1e-8)


@methods
@pytest.mark.parametrize("batch_norm", ["support", "running"])
def test_each_query_is_classified_for_itself(name: str, batch_norm: str) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner).task
    alone = task.with_images(task.images[:, : task.n_support + 1])
    first = learner.log_probabilities(parameters, task)[:, :1]
    torch.testing.assert_close(learner.log_probabilities(parameters, alone), first, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [*((name, "transductive") for name in METHODS), ("maml", "support"), ("vampire", "support"), ("bmaml", "running")],
)
def test_queries_alone_share_one_adaptation(name: str, batch_norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, parameters = learner_of(name, batch_norm)
    task = tasks_for(learner, predictions=2).task
    each = [queries_alone(task, index, range(task.n_queries)) for index in range(task.n_tasks)]
    expected = torch.stack([learner.log_probabilities(parameters, one)[:, 0] for one in each])
    adapted: list[Task] = []
    adapt = InnerLoopLearner.adapt

    def counted(self: InnerLoopLearner, parameters: Parameters, task: Task) -> Any:
        adapted.append(task)
        return adapt(self, parameters, task)

    monkeypatch.setattr(InnerLoopLearner, "adapt", counted)
    found = predict_one_by_one(learner, parameters, task, at_once=2)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert len(adapted) == task.n_tasks


@methods
def test_query_labels_reach_the_training_loss_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, parameters = learner_of(name)
    task, labels = tasks_for(learner)

    start = type(learner.model).start

    def without_labels(model: Any, parameters: Parameters, inputs: Inputs) -> Any:
        assert inputs.labels is None, "a prediction may not start as training does"
        return start(model, parameters, inputs)

    monkeypatch.setattr(type(learner.model), "start", without_labels)
    learner.log_probabilities(parameters, task)
    monkeypatch.undo()
    one, other = (
        learner.gradient(parameters, Batch(task, Labels(truth))) for truth in (labels.queries, 2 - labels.queries)
    )
    assert not torch.allclose(one.losses["total"], other.losses["total"])


@methods
def test_weights_are_for_one_number_of_classes(name: str) -> None:
    method = METHODS[name]
    assert not method.any_way and not method.positional
    with pytest.raises(TridentError, match="classify 5 ways, not 4"):
        method.check_episode(EpisodeSpec(5), EpisodeSpec(4))
    method.check_episode(EpisodeSpec(5, 1, 10), EpisodeSpec(5, 3, 2))


@methods
def test_features_of_other_backbones_are_refused(name: str) -> None:
    with pytest.raises(TridentError, match="needs pictures and the conv4 backbone"):
        METHODS[name].model(FrozenBackbone(), TINY_EPISODE)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Maml(training_inner_steps=-1), "method.training_inner_steps is -1: 0 or more"),
        (lambda: Vampire(inner_steps=0), "method.inner_steps is 0: 1 or more"),
        (lambda: Vampire(samples=0), "method.samples is 0: 1 or more"),
        (lambda: Abml(kl_weight=-1.0), "method.kl_weight is -1.0: 0 or more"),
        (lambda: Platipus(initial_step=0.0), "method.initial_step is 0.0: it must be above 0"),
        (lambda: BayesianMaml(particles=1), "method.particles is 1: 2 or more"),
        (lambda: BayesianMaml(inner_optimizer="adam"), "particles take plain steps only"),
    ],
)
def test_settings_that_make_no_sense(make: Any, said: str) -> None:
    with pytest.raises(TridentError, match=said):
        make()


GOLDEN = {  # loss on the queries in training, and probability of the right class at test
    "maml": (1.479985, 0.252618),
    "anil": (1.665967, 0.201411),
    "boil": (1.759376, 0.200194),
    "abml": (1.555586, 0.241188),
    "vampire": (1.537436, 0.241211),
    "platipus": (1.634249, 0.241031),
    "bmaml": (1.587655, 0.206861),
}


@methods
def test_golden_numbers(name: str) -> None:
    """On two tasks of real glyphs, from random weights, in float64: they change only if the method does."""
    recipe = load_recipe(f"glyphs-{name}", ["backbone.channels=8"])
    recipe = recipe.in_training()
    learner = make_learner(recipe, Execution())
    task, labels = training_source(recipe, open_glyphs(), "cpu").batch(range(2))
    noise = {key: value.double() for key, value in task.noise.items()}
    task = replace(task, images=task.images.double() / 255, noise=noise)
    parameters = doubles(recipe.initial(0))
    loss = float(learner.gradient(parameters, Batch(task, labels)).losses["total"].mean())
    right = learner.log_probabilities(parameters, task).exp().gather(2, labels.queries[:, :, None])
    assert (loss, float(right.mean())) == pytest.approx(GOLDEN[name], rel=1e-5)


@methods
def test_they_are_trained_measured_and_label_piles(name: str, tmp_path: Path) -> None:
    """Samples and means of weights too; each query alone; and with the statistics of training."""
    training = replace(TINY_RECIPE.training, steps=2, validate_every=2, save_every=2, validation_tasks=2)
    recipe, store = replace(TINY_RECIPE, method=METHODS[name], training=training), tiny_store()
    run = tmp_path / "run"
    train(start_run(recipe, store, "noise", run, "cpu"), store, run, "cpu", Silent(), validate)
    checkpoint = load_checkpoint(run)
    accuracies = [
        evaluate(checkpoint, store, protocol, split="test", tasks=2, seed=0).predictions.log_probabilities
        for protocol in (
            Protocol(latents="mean"),
            Protocol(latents="average", latent_samples=2),
            Protocol(latents="mean", queries_at_once="one", batch_norm="running"),
            Protocol(latents="mean", batch_norm="running"),
        )
    ]
    assert np.allclose(accuracies[0], accuracies[1]) == (name not in RANDOM_WEIGHTS)
    np.testing.assert_allclose(accuracies[2], accuracies[3], atol=1e-3)
    images, labels = store.images[:6], np.array([0, 0, 1, 1, 2, 2])
    labeller = Labeller(checkpoint, ("a", "b", "c"), images, labels)
    found = labeller.probabilities(store.images[6:10])
    np.testing.assert_allclose(found.sum(1), 1)
    assert labeller.probabilities_alone(store.images[6:8]).shape == (2, 3)
