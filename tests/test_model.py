"""The network as a whole, and its objective."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import TINY_EPISODE, TINY_MODEL, doubles, tiny_tasks
from trident.learning.inner_loop import TaskBatch
from trident.methods.trident.network import PROTOTYPE_SCALE, UNIT_SCALE, Noise, Output, TaskImages, Trident
from trident.methods.trident.objective import loss_parts
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters
from trident.recipes import load_recipe
from trident.settings import ObjectiveSettings


def parameter_counts(recipe: str, *overrides: str) -> dict[str, int]:
    loaded = load_recipe(recipe, overrides)
    counts: dict[str, int] = {}
    for key, value in Trident(loaded.model, loaded.episode).initial(0).items():
        part = key.split(".")[0]
        counts[part] = counts.get(part, 0) + value.numel()
    return counts


def test_parameter_counts_of_the_papers_table() -> None:
    assert parameter_counts("mini-5w5s") == {
        "semantic_encoder": 28_896,
        "semantic": 2 * 51_264,
        "label_encoder": 28_896,
        "label": 2 * 55_360,
        "attfex": 6_944,
        "classifier": 2_245,
        "decoder": 132_009,
    }
    assert sum(parameter_counts("mini-5w5s").values()) == 412_238
    assert sum(parameter_counts("mini-5w1s").values()) == 410_760
    assert sum(parameter_counts("mini-5w1s", "model.decoder_batch_norm=true").values()) == 410_958
    assert parameter_counts("mini-5w1s")["attfex"] == 5_664


def test_elbo_against_a_hand_worked_example() -> None:
    # Two images of two pixels, three classes, one label latent and two semantic ones.
    output = Output(
        logits=torch.tensor([[[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]]]),
        label=Gaussian(torch.tensor([[[2.0], [0.0]]]), torch.tensor([[[0.0], [0.0]]])),
        semantic=Gaussian(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), torch.tensor([[[math.log(2), 0.0], [0.0, 0.0]]])),
        reconstruction=torch.tensor([[[[[0.5], [1.0]]], [[[0.0], [0.0]]]]]),
    )
    images = torch.tensor([[[[[1.0], [1.0]]], [[[0.0], [0.5]]]]])
    parts = loss_parts(output, images, torch.tensor([[2, 0]]), ObjectiveSettings(100, 0.01, 1, 1))
    classification = (math.log(3) + math.log(2)) / 2  # -ln 1/3 and -ln 2/4
    reconstruction = (0.25 + 0.25) / 2
    label_kl = (0.5 * 4 + 0) / 2
    semantic_kl = (0.5 * (2 - 1 - math.log(2)) + 0.5) / 2
    expected = [
        100 * classification + 0.01 * reconstruction + label_kl + semantic_kl,
        classification,
        reconstruction,
        label_kl,
        semantic_kl,
        0.0,
    ]
    assert [float(part) for part in parts] == pytest.approx(expected, rel=1e-6)
    # With a head for four training classes, of which the images are the last and the second.
    output = output._replace(training_class_logits=torch.tensor([[[0.0, 0, 0, 0], [0, math.log(5), 0, 0]]]))
    of_all = (math.log(4) + math.log(8 / 5)) / 2
    weights = ObjectiveSettings(100, 0.01, 1, 1, training_classes_weight=10)
    more = loss_parts(output, images, torch.tensor([[2, 0]]), weights, torch.tensor([[3, 1]]))
    assert [float(part) for part in more] == pytest.approx(
        [expected[0] + 10 * of_all, *expected[1:-1], of_all], rel=1e-6
    )


def run(model: Trident, tasks: TaskBatch, statistics: BatchNormStatistics | None = None) -> Output:
    parameters = for_tasks(doubles(model.initial(0)), tasks.n_tasks)
    return model(parameters, tasks.images, "query", tasks.query_noise[0], statistics or BatchNormStatistics())


def for_tasks(parameters: Parameters, tasks: int) -> Parameters:
    return {key: value.expand(tasks, *value.shape) for key, value in parameters.items()}


def permuted_queries(tasks: TaskBatch, order: Tensor) -> TaskBatch:
    n = tasks.images.n_support
    pixels = torch.cat([tasks.images.pixels[:, :n], tasks.images.pixels[:, n:][:, order]], 1)
    noise = Noise(*(part[:, order] for part in tasks.query_noise[0]))
    return tasks._replace(
        images=TaskImages(pixels, tasks.support_labels), query_labels=tasks.query_labels[:, order], query_noise=(noise,)
    )


def test_the_two_networks_are_intertwined_one_way() -> None:
    """z_semantic feeds z_label, never the reverse: the label noise must not reach the semantic posterior."""
    model, tasks = Trident(TINY_MODEL, TINY_EPISODE), tiny_tasks()
    plain = run(model, tasks)
    noise = tasks.query_noise[0]
    other_label = run(model, tasks._replace(query_noise=(noise._replace(label=noise.label + 1),)))
    other_semantic = run(model, tasks._replace(query_noise=(noise._replace(semantic=noise.semantic + 1),)))
    assert torch.equal(plain.semantic.loc, other_label.semantic.loc)
    assert torch.equal(plain.label.loc, other_label.label.loc)
    assert torch.equal(plain.semantic.loc, other_semantic.semantic.loc)
    assert not torch.allclose(plain.label.loc, other_semantic.label.loc)


def test_without_attfex_queries_may_come_in_any_order() -> None:
    model, tasks = Trident(replace(TINY_MODEL, attfex="off"), TINY_EPISODE), tiny_tasks()
    order = torch.randperm(TINY_EPISODE.n_queries)
    torch.testing.assert_close(run(model, permuted_queries(tasks, order)).logits, run(model, tasks).logits[:, order])


def test_positional_attfex_depends_on_the_order_of_the_queries() -> None:
    model, tasks = Trident(TINY_MODEL, TINY_EPISODE), tiny_tasks()
    order = torch.arange(TINY_EPISODE.n_queries).roll(1)
    assert not torch.allclose(run(model, permuted_queries(tasks, order)).logits, run(model, tasks).logits[:, order])


@pytest.mark.parametrize("source", ["support", "running"])
def test_inductive_statistics_keep_queries_apart(source: str) -> None:
    """Without AttFEX, what is said of one query must not change when another query changes."""
    model, tasks = Trident(replace(TINY_MODEL, attfex="off"), TINY_EPISODE), tiny_tasks()
    statistics = BatchNormStatistics(source, TINY_EPISODE.n_support, doubles(model.initial_running()))
    pixels = tasks.images.pixels.clone()
    pixels[:, -1] = 1 - pixels[:, -1]
    changed = tasks._replace(images=TaskImages(pixels, tasks.support_labels))
    before, after = run(model, tasks, statistics), run(model, changed, statistics)
    assert torch.allclose(before.logits[:, :-1], after.logits[:, :-1], atol=1e-12)
    assert not torch.allclose(before.logits[:, -1], after.logits[:, -1])
    assert before.reconstruction is not None
    assert before.reconstruction.shape == (2, TINY_EPISODE.n_queries, 16, 16, 1)


def test_refined_prototypes_are_soft_k_means() -> None:
    """One round, written out for each task: queries belong to classes by their probability, support images wholly."""
    settings = replace(TINY_MODEL, classifier_start="prototypes", classifier_width=7, attfex="off")
    model, tasks = Trident(settings, TINY_EPISODE, refinements=1), tiny_tasks()
    parameters = for_tasks(doubles(model.initial(0)), tasks.n_tasks)
    noise, statistics = tasks.query_noise[0], BatchNormStatistics()
    support = model.infer(parameters, tasks.images, "support", tasks.support_noise[0], statistics)
    parameters = parameters | model.prototype_classifier(parameters, support, tasks.support_labels)
    latents = model.infer(parameters, tasks.images, "query", noise, statistics)
    assert latents.n_context == TINY_EPISODE.n_support
    actual = model.generate(parameters, latents, statistics)
    assert actual.logits.shape == (2, TINY_EPISODE.n_queries, TINY_EPISODE.n_way)
    assert actual.label.loc.shape[1] == TINY_EPISODE.n_queries
    for task in range(2):
        own = {key: value[task] for key, value in parameters.items()}
        features = F.leaky_relu(latents.z_label[task] @ own["classifier.0.weight"].T + own["classifier.0.bias"], 0.2)
        known, unknown = features[: TINY_EPISODE.n_support], features[TINY_EPISODE.n_support :]
        given = torch.softmax(unknown @ own["classifier.1.weight"].T + own["classifier.1.bias"], 1)
        logits = []
        for way in range(TINY_EPISODE.n_way):
            mine = known[tasks.support_labels[task] == way]
            total = mine.sum(0) + (given[:, way, None] * unknown).sum(0)
            prototype = total / (len(mine) + given[:, way].sum())
            logits.append(-own["classifier.scale"] * (unknown - prototype).square().sum(1))
        expected = torch.log_softmax(torch.stack(logits, 1), 1)
        torch.testing.assert_close(torch.log_softmax(actual.logits[task], 1), expected)


@pytest.mark.parametrize(("kind", "scale"), [("plain", PROTOTYPE_SCALE), ("unit", UNIT_SCALE)])
def test_prototypes_start_from_distances_to_the_class_means(kind: str, scale: float) -> None:
    """Logits are scaled negative squared distances, up to a term that all classes share; labels in any order."""
    settings = replace(TINY_MODEL, classifier_start="prototypes", classifier_width=7, classifier_features=kind)  # type: ignore[arg-type]
    model, tasks = Trident(settings, TINY_EPISODE), tiny_tasks()
    parameters = for_tasks(doubles(model.initial(0)), tasks.n_tasks)
    labels = torch.tensor([[0, 1, 2, 2, 1, 0], [1, 1, 0, 0, 2, 2]])
    noise = tasks.support_noise[0]
    support = model.infer(parameters, tasks.images, "support", noise, BatchNormStatistics())
    layer = model.prototype_classifier(parameters, support, labels)
    z_label = model.infer(parameters, tasks.images, "support", noise, BatchNormStatistics()).z_label
    features = model._classifier_features(parameters, z_label)
    if kind == "unit":
        features = features / features.norm(dim=2, keepdim=True)
    logits = model.classifier[1](parameters | layer, features)
    for task in range(tasks.n_tasks):
        means = torch.stack([features[task][labels[task] == way].mean(0) for way in range(3)])
        distances = torch.cdist(features[task], means).square()
        expected = -scale * (distances - features[task].square().sum(1, keepdim=True))
        torch.testing.assert_close(logits[task], expected)


def test_log_variance_can_be_started_low_and_bounded() -> None:
    model = Trident(replace(TINY_MODEL, initial_log_var=-4.0, log_var_bound=3.0), TINY_EPISODE)
    output = run(model, tiny_tasks())
    assert output.label.log_var.abs().max() < 3
    assert output.label.log_var.mean() < -2


def test_the_same_seed_gives_the_same_start() -> None:
    model = Trident(TINY_MODEL, TINY_EPISODE)
    one, same, other = model.initial(3), model.initial(3), model.initial(4)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["label.loc.weight"], other["label.loc.weight"])
