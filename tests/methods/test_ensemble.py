"""Several networks side by side: the backbone's branches and the method that trains them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from short_runs import Interrupting, assert_same_weights, log_of, resume, run, with_training
from tiny import doubles, source_for, tiny_store
from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import INCLUDED
from trident.engines.execution import Execution, make_learner
from trident.engines.plain.heads import HeadLearner
from trident.errors import TridentError
from trident.learning import frozen_weights
from trident.learning.checkpoint import load_checkpoint, save_checkpoint, untrained
from trident.measuring.prediction import predict, predict_one_by_one
from trident.methods.ensemble import HEADS, Ensemble, attend, initial_attention
from trident.methods.inner_loop.maml import Maml
from trident.methods.metric.relation_network import RelationNetwork
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.parameters import Parameters, for_each_task, stacked
from trident.recipes.loading import load_recipe, with_overrides
from trident.settings import EpisodeSpec, Protocol, Views
from trident.tasks.task import Labels, Task, queries_alone
from trident.tasks.views import views_of

EPISODE = EpisodeSpec(3, 1, 2)
CLASSES = [0, 3, 1, 3, 0, 0, 2, 3]  # of a batch: 1 and 2 have one image, 4 has none
TRAINED = replace(
    with_training(images_per_step=12, weight_decay=0.1),
    backbone=Conv4Backbone(image_size=16, image_channels=1, channels=4, branches=3),
    method=Ensemble(training_classes=5, branches=3, attention=True, prototype_weight=0.5, variation=2),
    protocol=Protocol(batch_norm="running"),
)
BRIEFLY = with_training(TRAINED, steps=4, validate_every=4)


def some_task(n_images: int = 9) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, n_images, 20, 20, 3, generator=generator, dtype=torch.float64)
    return Task(images, torch.tensor([[0, 1, 2], [2, 0, 1]]), 3)


def random_parameters(backbone: Conv4Backbone) -> Parameters:
    start = backbone.initial(torch.Generator().manual_seed(1))
    return for_each_task({key: value.double() for key, value in start.items()}, 2)


def a_batch(method: Ensemble, seed: int = 0) -> tuple[Parameters, Tensor, Labels]:
    """Weights of the linear layers, features (1, image, feature) and labels of a training batch, in float64."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, len(CLASSES), 6, generator=generator, dtype=torch.float64)
    parameters = {key: value.double() for key, value in method.initial(6, generator).items()}
    truth = torch.tensor([CLASSES])
    return parameters, features, Labels(truth, truth)


def training_losses(method: Ensemble, parameters: Parameters, features: Tensor, labels: Labels) -> dict[str, Tensor]:
    task = Task(features, torch.zeros(1, 0, dtype=torch.int64), 5)
    return method.training(parameters, features, task, labels)[1]


def test_branches_are_networks_of_their_own() -> None:
    several = Conv4Backbone(image_size=20, channels=4, branches=3)
    task, parameters = some_task(), random_parameters(several)
    statistics = BatchNormStatistics("transductive", 0)
    maps, seen = several(parameters, task, statistics)
    assert maps.flatten(2).shape[2] == several.n_features == several.n_cells * 4
    for place, network in enumerate(several.networks):
        alone, of_it = network(parameters, task.pixels, statistics)
        torch.testing.assert_close(maps.flatten(2).chunk(3, 2)[place], alone.flatten(2))
        for key, value in of_it.items():
            torch.testing.assert_close(seen[key], value)
    assert several.names == parameters.keys() and len(several.names) == 3 * len(Conv4Backbone().names)
    assert Conv4Backbone().names < several.names  # so that weights of one network can start the first branch


def expected_losses(method: Ensemble, parameters: Parameters, features: Tensor) -> tuple[float, float]:
    """The equations of the docstring, image by image."""
    of_classes, of_prototypes = [], []
    for branch, apart in enumerate(features[0].numpy().reshape(len(CLASSES), method.branches, -1).swapaxes(0, 1)):
        weight, bias = (parameters[f"classes.{key}"][branch].numpy() for key in ("weight", "bias"))
        unit = apart / np.linalg.norm(apart, axis=1, keepdims=True)
        for i, c in enumerate(CLASSES):
            logits = weight @ apart[i] + bias
            of_classes.append(np.log(np.exp(logits).sum()) - logits[c])
            scores = {}
            for k in range(5):
                others = [unit[j] for j, other in enumerate(CLASSES) if other == k and j != i]
                if others:
                    mean = np.mean(others, 0)
                    scores[k] = method.prototype_scale * unit[i] @ mean / np.linalg.norm(mean)
            if c in scores:
                of_prototypes.append(np.log(np.exp(list(scores.values())).sum()) - scores[c])
    return float(np.mean(of_classes)), float(np.mean(of_prototypes))


@pytest.mark.parametrize("branches", [1, 2])
def test_the_losses_are_those_of_the_equations(branches: int) -> None:
    method = Ensemble(training_classes=5, branches=branches, prototype_weight=0.7, prototype_scale=3.0)
    parameters, features, labels = a_batch(method)
    losses = training_losses(method, parameters, features, labels)
    classes, prototypes = expected_losses(method, parameters, features)
    assert losses["classes"].item() == pytest.approx(classes, rel=1e-9)
    assert losses["prototypes"].item() == pytest.approx(prototypes, rel=1e-9)
    assert losses["total"].item() == pytest.approx(classes + 0.7 * prototypes, rel=1e-9)


def test_the_gradient_of_the_losses_is_right() -> None:
    method = Ensemble(training_classes=5, branches=2, prototype_weight=0.7)
    parameters, features, labels = a_batch(method)

    def total(*values: Tensor) -> Tensor:
        *weights, changed = values
        return training_losses(method, dict(zip(parameters, weights, strict=True)), changed, labels)["total"]

    inputs = [value.requires_grad_() for value in (*parameters.values(), features)]
    assert torch.autograd.gradcheck(total, inputs)


def test_no_class_of_the_batch_needs_several_images() -> None:
    method = Ensemble(training_classes=5, branches=2, prototype_weight=1.0)
    parameters, features, _ = a_batch(method)
    apart = torch.arange(5)[None]
    losses = training_losses(method, parameters, features[:, :5], Labels(apart, apart))
    assert losses["prototypes"].item() == 0 and losses["total"] == losses["classes"]


def test_it_predicts_by_soft_k_means_on_unit_features_of_all_branches() -> None:
    method, task = Ensemble(training_classes=5, branches=2, rounds=3), some_task()
    features = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    unit = torch.cat([F.normalize(part, dim=2) for part in features.chunk(2, 2)], 2)
    torch.testing.assert_close(method.head({}, features, task), SoftKMeans(rounds=3).head({}, unit, task))
    scaled = torch.cat([5 * features[:, :, :6], features[:, :, 6:]], 2)  # no branch counts more than another
    for used in (method, method.for_few_queries()):
        torch.testing.assert_close(used.head({}, scaled, task), used.head({}, features, task))


@pytest.mark.parametrize("batch_norm", ["running", "transductive"])
def test_features_are_averaged_over_the_views_after_attention(batch_norm: Literal["running", "transductive"]) -> None:
    views = Views(mirrored=True, shifted=True, average="features")
    recipe = replace(TRAINED, views=views, protocol=Protocol(batch_norm=batch_norm))
    parameters, running = doubles(recipe.initial(0)), doubles(recipe.model.initial_running())
    parameters["attention.output"] = torch.randn(3, 4, 4, dtype=torch.float64)
    drawn = source_for(recipe, tiny_store(), "test", sampled=False).batch(range(2)).task
    task = drawn.with_images(drawn.images.double() / 255)
    learner = make_learner(recipe, Execution(), running)
    assert isinstance(learner, HeadLearner) and isinstance(recipe.method, Ensemble)
    without = replace(recipe.method, attention=False)

    def expected(shown: Task) -> Tensor:
        seen = [learner.features(parameters, shown.with_images(view)) for view in views_of(shown.images, views)]
        units = [
            F.normalize(attend(parameters, features.reshape(*features.shape[:2], 3, -1)), dim=3) for features in seen
        ]
        return without.head(parameters, torch.stack(units).mean(0).flatten(2), shown).log_softmax(2)

    torch.testing.assert_close(predict(learner, parameters, task, views), expected(task))
    alone = predict_one_by_one(learner, parameters, task, 4, views)
    for place in range(2):
        singly = queries_alone(task, place, range(task.n_queries))
        torch.testing.assert_close(alone[place], expected(singly)[:, 0])
    assert "mirror images and shifted images too, mean features" in recipe.describe_protocol()


def test_attention_is_that_of_the_equations() -> None:
    branches, cells, channels, size = 2, 3, 8, 8 // HEADS
    generator = torch.Generator().manual_seed(5)
    start = initial_attention(branches, cells, channels, generator)
    features = torch.randn(2, 4, branches, cells * channels, generator=generator, dtype=torch.float64)
    parameters = {key: value.double() for key, value in start.items()}
    torch.testing.assert_close(attend(parameters, features), features)  # at the start nothing is added
    parameters["attention.output"] = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    found = attend(parameters, features).numpy().reshape(8, branches, cells, channels)
    maps = features.numpy().reshape(8, branches, cells, channels)
    for branch in range(branches):
        positions, qkv, output = (value[branch].numpy() for value in parameters.values())
        for image in range(8):
            seen = maps[image, branch] + positions
            seen = (seen - seen.mean(1, keepdims=True)) / np.sqrt(seen.var(1, keepdims=True) + 1e-5)
            queries, keys, values = np.split(seen @ qkv, 3, 1)  # (cell, channel) each
            for cell in range(cells):
                added = []
                for head in (slice(size * h, size * (h + 1)) for h in range(HEADS)):
                    weights = np.exp(keys[:, head] @ queries[cell, head] / np.sqrt(size))
                    added.append(weights / weights.sum() @ values[:, head])
                expected = maps[image, branch, cell] + np.concatenate(added) @ output
                np.testing.assert_allclose(found[image, branch, cell], expected, rtol=1e-9)


def test_attention_is_used_in_training_and_in_prediction() -> None:
    method, backbone = Ensemble(5, branches=2, attention=True), Conv4Backbone(image_size=32, channels=4, branches=2)
    generator = torch.Generator().manual_seed(6)
    parameters = method.model(backbone, EPISODE).initial(generator)
    computed_before = FrozenBackbone("of it", backbone.n_features, backbone.n_cells)
    reduced = method.model(computed_before, EPISODE).initial(generator)
    assert reduced.keys() == parameters.keys() - backbone.names
    assert all(reduced[key].shape == parameters[key].shape for key in reduced)
    parameters["attention.output"] = torch.randn(2, 4, 4, generator=generator)
    features, task = torch.randn(2, 9, backbone.n_features, generator=generator), some_task()
    apart = attend(parameters, features.reshape(2, 9, 2, -1)).flatten(2)
    for used in (method, method.for_few_queries()):
        without = replace(used, attention=False)
        seen = used.image_features(parameters, features)
        torch.testing.assert_close(used.head(parameters, seen, task), without.head(parameters, apart, task))
    labels = Labels(torch.zeros(2, 9, dtype=torch.int64))
    found = method.training(parameters, features, task, labels)
    torch.testing.assert_close(found, replace(method, attention=False).training(parameters, apart, task, labels))


def test_whether_queries_are_classified_together() -> None:
    alone = Ensemble(5, rounds=0, variation=2, damping=0.0)
    assert not alone.classifies_together and not SoftKMeans(rounds=0).classifies_together
    for together in (
        replace(alone, rounds=1),
        replace(alone, centre="task"),
        replace(alone, damping=10.0),
        SoftKMeans(),
    ):
        assert together.classifies_together


def test_maps_of_another_size_are_an_error() -> None:
    parameters = initial_attention(1, 25, 4, torch.Generator())
    with pytest.raises(RuntimeError, match="shape"):
        attend(parameters, torch.zeros(1, 25, 1, 36 * 4))


def test_as_a_frozen_backbone_it_has_the_features_that_it_compares(tmp_path: Path) -> None:
    """Soft k-means on features that were computed image by image predicts what the ensemble does on the pile."""
    views, store = Views(mirrored=True, shifted=True, average="features"), tiny_store()
    run(tmp_path / "run", replace(BRIEFLY, views=views), store)
    checkpoint = load_checkpoint(tmp_path / "run")
    network = frozen_weights.load(f"weights:{tmp_path / 'run'}")
    task = source_for(checkpoint.recipe, store, "test").batch([0, 1, 2]).task
    learner = make_learner(checkpoint.recipe, Execution(), checkpoint.running)
    expected = predict(learner, checkpoint.parameters, task, views)
    pixels = task.images.flatten(0, 1).numpy()
    seen = torch.from_numpy(network.features(pixels)).view(*task.images.shape[:2], -1)
    own = SoftKMeans(**{entry.name: getattr(checkpoint.recipe.method, entry.name) for entry in fields(SoftKMeans)})
    found = own.head({}, seen, task.with_images(seen)).log_softmax(2)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)  # sums in another order
    assert network.features(pixels[5:6]).tobytes() == network.features(pixels)[5:6].tobytes()


def test_weights_on_its_features_cannot_take_pictures() -> None:
    backbone = FrozenBackbone(INCLUDED, 4800)
    with pytest.raises(TridentError, match=f"features of {INCLUDED}, not pictures"):
        frozen_weights.with_conv4(untrained(replace(load_recipe("features-nearest-mean"), backbone=backbone)))


def test_the_included_backbone_is_never_a_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mini-ensemble").write_text("not weights")
    monkeypatch.chdir(tmp_path)
    assert frozen_weights.load(INCLUDED).n_features == 4800


@pytest.mark.parametrize("changed", ["views.mirrored=false", "method.damping=1"])
def test_other_views_or_damping_are_another_backbone(tmp_path: Path, changed: str) -> None:
    views = Views(mirrored=True, average="features")
    run(tmp_path / "run", replace(BRIEFLY, views=views), tiny_store())
    checkpoint = load_checkpoint(tmp_path / "run")
    other = with_overrides(checkpoint.recipe, [changed])
    save_checkpoint(tmp_path / "other.safetensors", replace(checkpoint, recipe=other))
    names = (f"weights:{tmp_path / 'run'}", f"weights:{tmp_path / 'other.safetensors'}")
    first, second = (frozen_weights.load(name) for name in names)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 1), np.uint8)
    assert first.fingerprint != second.fingerprint
    assert not np.allclose(first.features(pixels), second.features(pixels))


def test_a_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    store = tiny_store()
    whole = run(tmp_path / "whole", TRAINED, store)
    losses = [line["losses"] for line in log_of(tmp_path / "whole", "train")]
    assert losses[-1]["classes"] < losses[0]["classes"] and losses[-1]["prototypes"] < losses[0]["prototypes"]
    assert run(tmp_path / "half", TRAINED, store, Interrupting(10)).step == 10
    assert_same_weights(whole, resume(tmp_path / "half", store))
    assert load_checkpoint(tmp_path / "whole").recipe.method.describe() == (
        "3 branches with attention, damping 10, 8 rounds, learned class sizes"
    )


def test_numbers_of_branches_that_do_not_fit_are_errors() -> None:
    backbone = Conv4Backbone(image_size=16, channels=4, branches=3)
    with pytest.raises(TridentError, match=r"method.branches is 2: it must be 3, as backbone.branches"):
        Ensemble(training_classes=5, branches=2).model(backbone, EPISODE)
    with pytest.raises(TridentError, match=r"backbone.branches is 3: it must be 1 for MAML"):
        Maml().model(backbone, EPISODE)
    with pytest.raises(TridentError, match=r"backbone.branches is 3: it must be 1 for Relation Network"):
        RelationNetwork().model(backbone, EPISODE)
    with pytest.raises(TridentError, match=r"needs a multiple of 4 channels, not 6: set backbone.channels"):
        Ensemble(5, attention=True).model(Conv4Backbone(image_size=16, channels=6), EPISODE)
    with pytest.raises(TridentError, match=r"method.attention needs the feature maps of 2 networks"):
        Ensemble(5, branches=2, attention=True).model(FrozenBackbone("features", 8), EPISODE)
    with pytest.raises(TridentError, match="branches is 0"):
        Conv4Backbone(branches=0)


def test_stacked_values_are_those_of_torch() -> None:
    values = [torch.randn(3, 2) for _ in range(4)]
    assert torch.equal(stacked(values), torch.stack(values))
    with torch.device("meta"):
        assert stacked([torch.empty(3, 2)] * 4).shape == (4, 3, 2)
