"""The network as a whole, and its objective."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import TINY_BACKBONE, TINY_EPISODE, TINY_METHOD, doubles, initial, tiny_tasks
from trident.methods.inner_loop.base import Inputs
from trident.methods.trident.network import PROTOTYPE_SCALE, UNIT_SCALE, Network, inner_draw
from trident.methods.trident.objective import (
    OPTIONAL,
    TERMS,
    Inferred,
    Latents,
    ObjectiveSettings,
    negative_evidence_lower_bound,
)
from trident.methods.trident.settings import TridentSettings
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.gaussian import Gaussian
from trident.nn.parameters import Parameters, for_each_task
from trident.recipes.loading import load_recipe
from trident.tasks.task import Task

TRANSDUCTIVE = BatchNormStatistics()
N_SUPPORT = TINY_EPISODE.n_support


def network(method: TridentSettings = TINY_METHOD) -> Network:
    return Network(method, TINY_BACKBONE, TINY_EPISODE)


def start_of(model: Network, n_tasks: int = 2) -> Parameters:
    """Random weights in float64, the same for each task."""
    return for_each_task(doubles(initial(model)), n_tasks)


def parameter_counts(recipe: str, *overrides: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for key, value in load_recipe(recipe, overrides).initial(0).items():
        part = key.split(".")[0]
        counts[part] = counts.get(part, 0) + value.numel()
    return counts


def test_parameter_counts_of_the_papers_table() -> None:
    assert parameter_counts("mini-5w5s") == {
        "semantic_encoder": 28_896,
        "semantic": 2 * 51_264,
        "backbone": 28_896,
        "label": 2 * 55_360,
        "attfex": 6_944,
        "classifier": 2_245,
        "decoder": 132_009,
    }
    assert sum(parameter_counts("mini-5w5s").values()) == 412_238
    assert sum(parameter_counts("mini-5w1s").values()) == 410_760
    assert sum(parameter_counts("mini-5w1s", "method.decoder_batch_norm=true").values()) == 410_958
    assert parameter_counts("mini-5w1s")["attfex"] == 5_664


def test_elbo_against_a_hand_worked_example() -> None:
    # Two images of two pixels, three classes, one label latent and two semantic ones.
    label = Gaussian(torch.tensor([[[2.0], [0.0]]]), torch.tensor([[[0.0], [0.0]]]))
    semantic = Gaussian(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]), torch.tensor([[[math.log(2), 0.0], [0.0, 0.0]]]))
    decoded = torch.tensor([[[[[0.5], [1.0]]], [[[0.0], [0.0]]]]])
    images = torch.tensor([[[[[1.0], [1.0]]], [[[0.0], [0.5]]]]])
    inferred = Inferred(
        Latents(semantic, label, semantic.loc, label.loc, 0),
        logits=torch.tensor([[[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]]]),
        labels=torch.tensor([[2, 0]]),
        squared_error=(decoded - images).square().sum((2, 3, 4)).mean(1),
        label_divergence=label.kl_to_standard_normal(),
        semantic_divergence=semantic.kl_to_standard_normal(),
    )
    classification = (math.log(3) + math.log(2)) / 2  # -ln 1/3 and -ln 2/4
    reconstruction = (0.25 + 0.25) / 2
    label_kl = (0.5 * 4 + 0) / 2
    semantic_kl = (0.5 * (2 - 1 - math.log(2)) + 0.5) / 2
    expected = {
        "total": 100 * classification + 0.01 * reconstruction + label_kl + semantic_kl,
        "classification": classification,
        "reconstruction": reconstruction,
        "label_kl": label_kl,
        "semantic_kl": semantic_kl,
        "training_class": 0.0,
    }
    parts = negative_evidence_lower_bound(inferred, ObjectiveSettings(100, 0.01, 1, 1))
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(expected, rel=1e-6)
    # With a head for four training classes, of which the images are the last and the second.
    inferred = replace(
        inferred,
        training_class_logits=torch.tensor([[[0.0, 0, 0, 0], [0, math.log(5), 0, 0]]]),
        training_classes=torch.tensor([[3, 1]]),
    )
    of_all = (math.log(4) + math.log(8 / 5)) / 2
    more = negative_evidence_lower_bound(inferred, ObjectiveSettings(100, 0.01, 1, 1, training_class_weight=10))
    expected |= {"total": expected["total"] + 10 * of_all, "training_class": of_all}
    assert {name: float(part) for name, part in more.items()} == pytest.approx(expected, rel=1e-6)


def test_decorrelation_is_the_mean_squared_correlation_of_the_two_latents() -> None:
    model = network(replace(TINY_METHOD, decorrelation_weight=3.0))
    task, labels = tiny_tasks()
    latents, _ = model.infer(start_of(model), Inputs(task, TRANSDUCTIVE))
    found = model.loss(start_of(model), Inputs(task, TRANSDUCTIVE, labels=labels)).losses
    for i in range(2):
        label, semantic = latents.label.loc[i], latents.semantic.loc[i]
        together = torch.corrcoef(torch.cat([label, semantic], 1).T)  # of every number of the latents with every other
        wanted = together[: label.shape[1], label.shape[1] :].square().mean()
        torch.testing.assert_close(found["decorrelation"][i], wanted, rtol=1e-3, atol=1e-3)
    without = network().loss(start_of(model), Inputs(task, TRANSDUCTIVE, labels=labels)).losses
    torch.testing.assert_close(found["total"], without["total"] + 3 * found["decorrelation"])


@pytest.mark.parametrize("both", [True, False])
def test_z_label_may_be_kept_from_learning_to_reconstruct(both: bool) -> None:
    model = network(replace(TINY_METHOD, label_learns_to_reconstruct=both))
    parameters = {key: value.requires_grad_() for key, value in start_of(model).items()}
    task, labels = tiny_tasks()
    error = model.loss(parameters, Inputs(task, TRANSDUCTIVE, labels=labels)).losses["reconstruction"]
    names = ["label.loc.weight", "backbone.0.weight", "semantic.loc.weight", "decoder.0.weight"]
    gradients = torch.autograd.grad(error.sum(), [parameters[name] for name in names], materialize_grads=True)
    assert [bool(gradient.any()) for gradient in gradients] == [both, both, True, True]


@pytest.mark.parametrize("refinements", [0, 2])
@pytest.mark.parametrize("source", ["transductive", "support"])
def test_the_loss_of_the_queries_is_made_from_their_latents_only(source: str, refinements: int) -> None:
    """Support images may come along: they are in no term of the loss."""
    model = network(replace(TINY_METHOD, classifier_start="prototypes", refinements=refinements))
    task, labels = tiny_tasks()
    statistics = BatchNormStatistics(source, N_SUPPORT)
    parameters, _ = model.start(start_of(model), Inputs(task, statistics))
    latents, _ = model.infer(parameters, Inputs(task, statistics))
    first = latents.n_context
    assert first == (N_SUPPORT if refinements or source == "support" else 0)
    images, _ = model.decode(parameters, latents, statistics)
    found = model.loss(parameters, Inputs(task, statistics, labels=labels))
    assert found.losses.keys() == {"total", *TERMS} - OPTIONAL
    logits = model.classify(parameters, latents, task)
    torch.testing.assert_close(found.logits, logits)
    log_probabilities = torch.log_softmax(logits, 2)
    chosen = torch.stack(
        [log_probabilities[i, torch.arange(TINY_EPISODE.n_queries), labels.queries[i]] for i in range(2)]
    )
    expected = {
        "classification": -chosen.mean(1),
        "reconstruction": (images - task.pixels[:, N_SUPPORT:]).square().sum((2, 3, 4)).mean(1),
        "label_kl": Gaussian(*(x[:, first:] for x in latents.label)).kl_to_standard_normal().mean(1),
        "semantic_kl": Gaussian(*(x[:, first:] for x in latents.semantic)).kl_to_standard_normal().mean(1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found.losses[name], value)


def test_unlabelled_images_add_their_loss_without_the_label_term() -> None:
    """Against the formula: reconstruction and both KL divergences of the queries, with the weights of the objective."""
    method = replace(TINY_METHOD, reconstruction_weight=0.2, label_kl_weight=0.5, semantic_kl_weight=0.7)
    plain, model = (network(replace(method, unlabelled_weight=weight)) for weight in (0.0, 3.0))
    task, _ = tiny_tasks()
    of_step = {f"query/{inner_draw(0)}/{name}": task.noise[f"query/0/{name}"] for name in ("label", "semantic")}
    task = replace(task, noise={**task.noise, **of_step})
    _, label, semantic, images = run(model, task)
    expected = 0.2 * (images - task.pixels[:, N_SUPPORT:]).square().sum((2, 3, 4)).mean(1)
    for weight, (loc, log_var) in ((0.5, label), (0.7, semantic)):
        expected = expected + weight * 0.5 * (log_var.exp() + loc.square() - 1 - log_var).sum(2).mean(1)
    losses = [one.loss(start_of(one), Inputs(task, TRANSDUCTIVE, "support")).losses["total"] for one in (plain, model)]
    torch.testing.assert_close(losses[1] - losses[0], 3 * expected)


class Output(NamedTuple):
    """What a network says of the queries."""

    logits: Tensor
    label: Gaussian
    semantic: Gaussian
    reconstruction: Tensor


def run(model: Network, task: Task, statistics: BatchNormStatistics = TRANSDUCTIVE) -> Output:
    parameters = start_of(model, task.n_tasks)
    latents, _ = model.infer(parameters, Inputs(task, statistics))
    label, semantic = (Gaussian(*(x[:, latents.n_context :] for x in of)) for of in (latents.label, latents.semantic))
    images, _ = model.decode(parameters, latents, statistics)
    return Output(model.classify(parameters, latents, task), label, semantic, images)


def permuted_queries(task: Task, order: Tensor) -> Task:
    images = torch.cat([task.images[:, task.support], task.images[:, task.queries][:, order]], 1)
    noise = {name: values[:, order] if name.startswith("query/") else values for name, values in task.noise.items()}
    return replace(task, images=images, noise=noise)


def moved_noise(task: Task, latent: str) -> Task:
    name = f"query/0/{latent}"
    return replace(task, noise={**task.noise, name: task.noise[name] + 1})


def test_the_two_networks_are_intertwined_one_way() -> None:
    """z_semantic feeds z_label, never the reverse: the label noise must not reach the semantic posterior."""
    model, task = network(), tiny_tasks().task
    plain = run(model, task)
    other_label = run(model, moved_noise(task, "label"))
    other_semantic = run(model, moved_noise(task, "semantic"))
    assert torch.equal(plain.semantic.loc, other_label.semantic.loc)
    assert torch.equal(plain.label.loc, other_label.label.loc)
    assert torch.equal(plain.semantic.loc, other_semantic.semantic.loc)
    assert not torch.allclose(plain.label.loc, other_semantic.label.loc)
    apart = network(replace(TINY_METHOD, label_reads_semantic=False))
    assert torch.equal(run(apart, task).label.loc, run(apart, moved_noise(task, "semantic")).label.loc)


def test_without_attfex_queries_may_come_in_any_order() -> None:
    model, task = network(replace(TINY_METHOD, attfex="off")), tiny_tasks().task
    order = torch.randperm(TINY_EPISODE.n_queries)
    torch.testing.assert_close(run(model, permuted_queries(task, order)).logits, run(model, task).logits[:, order])


def test_positional_attfex_depends_on_the_order_of_the_queries() -> None:
    model, task = network(), tiny_tasks().task
    order = torch.arange(TINY_EPISODE.n_queries).roll(1)
    assert not torch.allclose(run(model, permuted_queries(task, order)).logits, run(model, task).logits[:, order])


@pytest.mark.parametrize("whole_task", [False, True])
@pytest.mark.parametrize("source", ["transductive", "support", "running"])
def test_which_images_the_semantic_batch_norm_sees(source: str, whole_task: bool) -> None:
    """By one set at a time or all at once, the features are the same; the setting says what they depend on."""
    model = network(replace(TINY_METHOD, semantic_batch_norm="task" if whole_task else "set"))
    task = tiny_tasks().task
    parameters, statistics = start_of(model), BatchNormStatistics(source, N_SUPPORT, doubles(model.initial_running()))

    def features(task: Task, rows: slice = slice(None)) -> Tensor:
        return model.encode_semantic(parameters, task, statistics, rows)[0]

    together = features(task)
    torch.testing.assert_close(features(task, task.support), together[:, task.support])
    torch.testing.assert_close(features(task, task.queries), together[:, task.queries])
    images = task.images.clone()
    images[:, -1] = 1 - images[:, -1]
    other_query = features(task.with_images(images))
    same = torch.isclose(other_query, together).flatten(2).all(2)  # (task, image)
    assert not same[:, -1].any()
    assert bool(same[:, task.support].all()) == (source != "transductive" or not whole_task)
    assert bool(same[:, N_SUPPORT:-1].all()) == (source != "transductive")
    images = task.images.clone()
    images[:, 0] = 1 - images[:, 0]
    other_support = features(task.with_images(images))
    same = torch.isclose(other_support, together).flatten(2).all(2)
    assert bool(same[:, task.queries].all()) == (source == "running" or (source == "transductive" and not whole_task))


@pytest.mark.parametrize("source", ["support", "running"])
def test_inductive_statistics_keep_queries_apart(source: str) -> None:
    """Without AttFEX, what is said of one query must not change when another query changes."""
    model, task = network(replace(TINY_METHOD, attfex="off")), tiny_tasks().task
    statistics = BatchNormStatistics(source, N_SUPPORT, doubles(model.initial_running()))
    images = task.images.clone()
    images[:, -1] = 1 - images[:, -1]
    before, after = run(model, task, statistics), run(model, task.with_images(images), statistics)
    assert torch.allclose(before.logits[:, :-1], after.logits[:, :-1], atol=1e-12)
    assert not torch.allclose(before.logits[:, -1], after.logits[:, -1])
    assert before.reconstruction.shape == (2, TINY_EPISODE.n_queries, 16, 16, 1)


def test_refined_prototypes_are_soft_k_means() -> None:
    """One round, written out for each task: queries belong to classes by their probability, support images wholly."""
    method = replace(
        TINY_METHOD, classifier_start="prototypes", classifier_width=7, attfex="off", refinements=1, inner_steps=0
    )
    model, task = network(method), tiny_tasks().task
    parameters, _ = model.start(start_of(model), Inputs(task, TRANSDUCTIVE))
    latents, _ = model.infer(parameters, Inputs(task, TRANSDUCTIVE))
    assert latents.n_context == N_SUPPORT
    actual = model.classify(parameters, latents, task)
    assert actual.shape == (2, TINY_EPISODE.n_queries, TINY_EPISODE.n_way)
    for index in range(2):
        own = {key: value[index] for key, value in parameters.items()}
        features = F.leaky_relu(latents.z_label[index] @ own["classifier.0.weight"].T + own["classifier.0.bias"], 0.2)
        known, unknown = features[:N_SUPPORT], features[N_SUPPORT:]
        given = torch.softmax(unknown @ own["classifier.1.weight"].T + own["classifier.1.bias"], 1)
        logits = []
        for way in range(TINY_EPISODE.n_way):
            mine = known[task.support_labels[index] == way]
            total = mine.sum(0) + (given[:, way, None] * unknown).sum(0)
            prototype = total / (len(mine) + given[:, way].sum())
            logits.append(-own["classifier.scale"] * (unknown - prototype).square().sum(1))
        expected = torch.log_softmax(torch.stack(logits, 1), 1)
        torch.testing.assert_close(torch.log_softmax(actual[index], 1), expected)


@pytest.mark.parametrize("sign", [1, -1])  # training may carry the scale below 0: the nearest class still wins
@pytest.mark.parametrize(("kind", "scale"), [("plain", PROTOTYPE_SCALE), ("unit", UNIT_SCALE)])
def test_prototypes_start_from_distances_to_the_class_means(kind: str, scale: float, sign: int) -> None:
    """Logits are scaled negative squared distances, up to a term that all classes share; labels in any order."""
    method = replace(TINY_METHOD, classifier_start="prototypes", classifier_width=7, classifier_features=kind)  # type: ignore[arg-type]
    model, task = network(method), tiny_tasks().task
    parameters = start_of(model)
    parameters = parameters | {name: sign * value for name, value in parameters.items() if name.endswith("scale")}
    labels = torch.tensor([[0, 1, 2, 2, 1, 0], [1, 1, 0, 0, 2, 2]])
    task = replace(task, support_labels=labels)
    started, _ = model.start(parameters, Inputs(task, TRANSDUCTIVE))
    support, _ = model.infer(parameters, Inputs(task, TRANSDUCTIVE, "support"))
    z_label, weight, bias = support.z_label, parameters["classifier.0.weight"], parameters["classifier.0.bias"]
    features = F.leaky_relu(z_label @ weight.transpose(1, 2) + bias[:, None], 0.2)
    if kind == "unit":
        features = features / features.norm(dim=2, keepdim=True)
    logits = model.classifier[1](started, features)
    for index in range(task.n_tasks):
        means = torch.stack([features[index][labels[index] == way].mean(0) for way in range(3)])
        distances = torch.cdist(features[index], means).square()
        expected = -scale * (distances - features[index].square().sum(1, keepdim=True))
        torch.testing.assert_close(logits[index], expected)


def test_log_variance_can_be_started_low_and_bounded() -> None:
    model = network(replace(TINY_METHOD, initial_log_var=-4.0, log_var_bound=3.0))
    output = run(model, tiny_tasks().task)
    assert output.label.log_var.abs().max() < 3
    assert output.label.log_var.mean() < -2


def test_the_same_seed_gives_the_same_start() -> None:
    model = network()
    one, same, other = initial(model, 3), initial(model, 3), initial(model, 4)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["label.loc.weight"], other["label.loc.weight"])
