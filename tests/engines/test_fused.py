"""Whole gradients of the fused engine against the plain one in float64. Needs an NVIDIA GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from gpu import gpu, gpu_nan, on_gpu
from studies.speed.benchmarks import relative_error
from studies.speed.made_up import made_up_store, made_up_tasks
from tiny import Silent, doubles, one_task
from trident.data.glyphs import open_glyphs
from trident.engines.execution import Execution, execution_for, make_learner
from trident.engines.learner import Learner
from trident.engines.plain.heads import HeadLearner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.learning.checkpoint import LAST, Checkpoint, load_checkpoint
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.evaluate import validate
from trident.measuring.prediction import predict
from trident.nn.parameters import Parameters, on_device
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.settings import Views
from trident.tasks.source import ClassSource
from trident.tasks.task import Batch


def small(name: str, *settings: str) -> Recipe:
    """A recipe of TRIDENT with two inner steps and few queries, the images half as large."""
    size = [] if name.startswith("glyphs") else ["backbone.image_size=44"]
    return load_recipe(name, ["method.inner_steps=2", "episode.n_query=3", *size, *settings])


def small_head(name: str) -> Recipe:
    """A recipe of a head on features; 64 channels would need 16 bits."""
    size = [] if name.startswith("glyphs") else ["backbone.image_size=44", "backbone.channels=32"]
    on_classes = load_recipe(name).method.about.trained_on == "classes"
    classes = ["method.training_classes=5"] if on_classes else []  # as many as are made up
    classes += ["method.variation=3"] if name == "glyphs-ensemble" else []
    tasks = ["training.task_ways=none", "training.task_queries=none"]
    return load_recipe(name, ["episode.n_query=3", *size, *classes, *tasks]).in_training()


def both(recipe: Recipe) -> tuple[Learner, Learner]:
    """The plain learner and the fused one, in full precision."""
    plain, fused = (make_learner(recipe, Execution("cuda", engine)) for engine in ("plain", "fused"))
    return plain, fused


def start_of(recipe: Recipe) -> Parameters:
    start = recipe.initial(0)
    if "attention.output" in start:  # zero at the start of training: attention would change nothing
        generator = torch.Generator().manual_seed(0)
        start["attention.output"] = torch.randn(start["attention.output"].shape, generator=generator) / 8
    return on_device(start, "cuda")


def assert_same_gradient(recipe: Recipe, batch: Batch, apart: Sequence[Batch]) -> None:
    """The fused gradient of a batch, and of others one by one, against the plain one in float64. All are on the CPU."""
    plain, fused = both(recipe)
    parameters = start_of(recipe)
    exact = plain.gradient(doubles(parameters), on_gpu(batch, torch.float64))
    found = fused.gradient(parameters, on_gpu(batch))
    again = fused.gradient(parameters, on_gpu(batch))
    assert found.losses.keys() == exact.losses.keys()
    for name, expected in exact.losses.items():
        torch.testing.assert_close(found.losses[name].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.accuracy, exact.accuracy)
    assert bool(found.finite.all()) and bool(exact.finite.all())
    assert found.statistics.keys() == exact.statistics.keys()
    for key, value in exact.statistics.items():
        torch.testing.assert_close(found.statistics[key].double(), value, rtol=1e-3, atol=1e-4)
    assert found.gradient.keys() == exact.gradient.keys() == parameters.keys()
    for key, value in found.gradient.items():
        assert value.shape == parameters[key].shape
        assert torch.equal(value, again.gradient[key]), f"{key} is not reproducible"

    def error(learner: Learner, one: Batch) -> float:
        exact = plain.gradient(doubles(parameters), on_gpu(one, torch.float64)).gradient
        return relative_error(doubles(learner.gradient(parameters, on_gpu(one)).gradient), exact)

    # The network has kinks: rounding that crosses one turns a gradient by a thousandth or so, in either engine. Few
    # tasks lie so near to one, a wrong gradient would be wrong in all of them.
    fused_error, plain_error = (median(error(learner, one) for one in apart) for learner in (fused, plain))
    print(f"\n{recipe.name}: fused {fused_error:.1e}, plain float32 {plain_error:.1e}")
    assert fused_error < max(3e-4, 3 * plain_error)


PROTOTYPES = "method.classifier_start=prototypes"
REFINED = [PROTOTYPES, "method.attfex=set", "method.refinements=2"]
VARIANTS = [
    ("mini-5w1s", []),
    ("mini-5w5s", ["method.inner_rate=1e-4"]),
    ("tiered-5w1s", ["method.inner_rate=1e-4"]),
    ("tiered-5w5s", ["method.inner_rate=1e-4", "method.attention_scale=outside"]),
    ("glyphs", []),
    ("mini-5w5s", ["method.inner_rate=1e-4", PROTOTYPES, "method.reconstruction_weight=0"]),
    ("mini-5w1s", ["method.inner_optimizer=adam", "method.inner_rate=1e-4"]),
    ("mini-5w1s", [PROTOTYPES, "method.attfex=off"]),
    ("mini-5w1s", [PROTOTYPES, "method.label_reads_semantic=false"]),
    ("mini-5w1s", ["method.label_learns_to_reconstruct=false", "method.decorrelation_weight=10"]),
    ("mini-5w1s", ["method.inner_order=first"]),
    ("mini-5w1s", REFINED),
    ("mini-5w5s", ["method.inner_rate=1e-4", "method.attfex=set"]),
    ("mini-5w1s", ["method.inner_steps=0", "backbone.channels=16", "method.log_var_bound=4"]),
    ("mini-5w1s", ["method.inner_steps=0", PROTOTYPES, "method.attfex=set"]),
    ("mini-5w1s", ["method.semantic_channels=16", "backbone.channels=32", "method.training_classes=5"]),
    ("mini-5w1s", ["method.semantic_batch_norm=task", "method.inner_rate=1e-4"]),
    ("mini-5w5s", ["method.semantic_batch_norm=task", "method.inner_rate=1e-4"]),
    ("mini-5w1s", ["method.semantic_batch_norm=task", PROTOTYPES]),
    ("mini-5w1s", ["method.semantic_batch_norm=task", "method.inner_optimizer=adam", "method.inner_rate=1e-4"]),
    ("mini-5w1s", ["method.semantic_batch_norm=task", *REFINED, "method.inner_rate=1e-4"]),
    ("mini-5w1s", ["method.semantic_batch_norm=set", *REFINED, "method.inner_steps=0"]),
    ("mini-5w1s", ["method.semantic_batch_norm=task", *REFINED, "method.inner_steps=0"]),
]


@gpu
@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_meta_gradient_is_the_plain_one(name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Adam divides by the gradient's size. Where that is nearly nothing rounding decides: with its usual 1e-8, weights
    # moved by a millionth change a float64 meta-gradient by a hundredth and more. With 1e-2 there is a right answer.
    monkeypatch.setattr("trident.methods.inner_loop.base.ADAM_EPSILON_ROOT", 1e-4)
    recipe = small(name, *settings)
    several = made_up_tasks(recipe, 5)
    assert_same_gradient(recipe, made_up_tasks(recipe, 3), [one_task(several, index) for index in range(5)])


@gpu
def test_the_head_for_all_training_classes_is_in_the_meta_gradient() -> None:
    recipe = small("mini-5w1s", "method.training_classes=7")
    task, labels = made_up_tasks(recipe, 5)
    classes = torch.randint(0, 7, labels.queries.shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(task, labels._replace(training_classes=classes))
    apart = [one_task(batch, index) for index in range(5)]
    assert_same_gradient(recipe, batch, apart)


EPISODE_HEADS = ["mini-5w1s-protonet", "mini-5w1s-matching", "mini-5w5s-matching", "glyphs-matching"]
EPISODE_HEADS += ["mini-5w1s-relation-network", "mini-5w5s-feat", "mini-5w1s-frn", "mini-5w5s-frn", "glyphs-frn"]
EPISODE_HEADS += ["mini-5w1s-versa", "mini-5w5s-dkt", "mini-5w1s-ove-polya-gamma"]
EPISODE_HEADS += ["mini-5w1s-logistic-softmax-predictive", "glyphs-logistic-softmax-gp", "glyphs-sib"]
EPISODE_HEADS += ["glyphs-metaqda", "mini-5w1s-abpml"]
# Not glyphs-ssr: it adds up in any order, so its gradient is not reproducible bit by bit.
CLASS_HEADS = ["mini-simpleshot", "glyphs-simpleshot", "mini-baseline-plus-plus", "mini-assoc-align"]
CLASS_HEADS += ["mini-ensemble", "glyphs-ensemble"]


@gpu
@pytest.mark.parametrize("name", EPISODE_HEADS)
def test_the_gradient_of_heads_trained_on_episodes_is_the_plain_one(name: str) -> None:
    from trident.engines.fused.heads import FusedHeadLearner

    recipe = small_head(name)
    plain, fused = both(recipe)
    assert type(plain) is HeadLearner and type(fused) is FusedHeadLearner
    several = made_up_tasks(recipe, 5)
    assert_same_gradient(recipe, made_up_tasks(recipe, 3), [one_task(several, index) for index in range(5)])


@gpu
@pytest.mark.parametrize("name", CLASS_HEADS)
def test_the_gradient_of_heads_trained_on_all_classes_is_the_plain_one(name: str) -> None:
    """A batch is one task without a support set, whose queries are the images."""
    recipe = small_head(name)
    assert recipe.protocol.batch_norm == "transductive"  # in training
    source = ClassSource(made_up_store(recipe), 16, seed=0)
    batch = source.batch([0])
    assert (batch.task.n_support, batch.task.n_queries, batch.task.n_way) == (0, 16, 5)
    assert_same_gradient(recipe, batch, [source.batch([index]) for index in range(1, 6)])
    drawn_there = ClassSource(made_up_store(recipe), 16, seed=0, device="cuda").batch([0])
    assert torch.equal(drawn_there.task.images.cpu(), batch.task.images)
    fused = both(recipe)[1]
    losses = [fused.gradient(start_of(recipe), one).losses["total"] for one in (drawn_there, on_gpu(batch))]
    assert torch.equal(*losses)


@gpu
@pytest.mark.parametrize("name", [*EPISODE_HEADS, *CLASS_HEADS])
def test_predictions_of_heads_are_the_plain_ones(name: str) -> None:
    recipe = small_head(name)
    task = on_gpu(made_up_tasks(recipe, 3)).task
    generator = torch.Generator().manual_seed(1)
    shapes = {key: value.shape for key, value in recipe.model.initial_running().items()}
    running = {key: torch.rand(shape, generator=generator).cuda() for key, shape in shapes.items()}
    plain, fused = (make_learner(recipe, Execution("cuda", engine), running) for engine in ("plain", "fused"))
    parameters = start_of(recipe)
    for views in (Views(), Views(mirrored=True, corners=True), Views(shifted=True, average="features")):
        found, expected = (predict(learner, parameters, task, views) for learner in (fused, plain))
        assert found.shape == (3, task.n_queries, task.n_way)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("name", ["mini-5w1s", "glyphs"])
def test_a_task_that_blows_up_spoils_nothing_else(name: str) -> None:
    recipe = small(name)
    fused = both(recipe)[1]
    batch = on_gpu(made_up_tasks(recipe, 3))
    parameters = start_of(recipe)
    poisoned = batch.task.noise["query/0/label"].clone()
    poisoned[1] = float("inf")
    task = replace(batch.task, noise={**batch.task.noise, "query/0/label": poisoned})
    broken = fused.gradient(parameters, batch._replace(task=task))
    assert broken.finite.tolist() == [True, False, True]
    apart = [fused.gradient(parameters, one_task(batch, index)).gradient for index in (0, 2)]
    for key, value in broken.gradient.items():
        torch.testing.assert_close(value, apart[0][key] + apart[1][key], rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["mini-5w1s", "mini-5w5s"])
def test_low_precision_stays_near(name: str, precision: str) -> None:
    recipe = small(name, "method.inner_rate=1e-4")
    plain = make_learner(recipe, Execution("cuda", "plain", "tf32"))
    fused = make_learner(recipe, execution_for("cuda", "fused", precision, recipe))
    batch = made_up_tasks(recipe, 8)
    parameters = start_of(recipe)
    exact = plain.gradient(doubles(parameters), on_gpu(batch, torch.float64)).gradient
    plain_error = relative_error(doubles(plain.gradient(parameters, on_gpu(batch)).gradient), exact)
    error = relative_error(doubles(fused.gradient(parameters, on_gpu(batch)).gradient), exact)
    print(f"\n{name}: fused {precision} {error:.1e}, plain tf32 {plain_error:.1e}")
    assert error < (8 if precision == "bf16" else 1.5) * plain_error


@gpu
def test_half_precision_holds_gradients_that_grow_on_their_way_through_the_decoder() -> None:
    # Training makes them grow: by 3,000 in a run on miniImageNet. Small features before a batch norm do the same.
    recipe = small("mini-5w5s", "method.inner_rate=1e-5")
    plain = make_learner(recipe, Execution("cuda", "plain", "tf32"))
    fused = make_learner(recipe, execution_for("cuda", "fused", "fp16", recipe))
    batch = made_up_tasks(recipe, 4)
    parameters = {
        key: value / 64 if key.startswith("decoder.linear.") else value for key, value in start_of(recipe).items()
    }
    exact = plain.gradient(doubles(parameters), on_gpu(batch, torch.float64)).gradient
    plain_error = relative_error(doubles(plain.gradient(parameters, on_gpu(batch)).gradient), exact)
    found = fused.gradient(parameters, on_gpu(batch))
    assert found.finite.all()
    error = relative_error(doubles(found.gradient), exact)
    print(f"\nfused fp16 {error:.1e}, plain tf32 {plain_error:.1e}")
    assert error < 2 * plain_error


@gpu
@pytest.mark.parametrize("settings", [[], ["method.semantic_batch_norm=task"], REFINED], ids=" ".join)
def test_adapting_and_predicting_are_the_plain_ones(settings: list[str]) -> None:
    from trident.engines.fused.trident import FusedTridentLearner

    recipe = small("mini-5w1s", *settings)
    plain, fused = both(recipe)
    task = on_gpu(made_up_tasks(recipe, 3)).task
    parameters = start_of(recipe)
    assert isinstance(fused, FusedTridentLearner) and isinstance(plain, InnerLoopLearner)
    steps, expected_steps = fused.adapt(parameters, task), plain.adapt(parameters, task)
    assert len(steps) == len(expected_steps) == 3
    assert relative_error(steps[-1][0], expected_steps[-1][0]) < 1e-4
    for views in (Views(), Views(mirrored=True, corners=True)):
        found, expected = (predict(learner, parameters, task, views) for learner in (fused, plain))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("glyphs", ["training.tasks_per_step=6", "training.tasks_per_chunk=4"]),
        ("glyphs-matching", ["training.tasks_per_step=6", "training.tasks_per_chunk=4"]),
        ("glyphs-simpleshot", []),
    ],
)
def test_a_run_resumes_bit_for_bit(name: str, sizes: list[str], tmp_path: Path) -> None:
    store = open_glyphs()

    def recipe(steps: int) -> Recipe:
        settings = [f"training.steps={steps}", "training.schedule=constant", "training.validation_tasks=4"]
        return load_recipe(name, [*sizes, *settings])

    def trained(start: Checkpoint, folder: str) -> Checkpoint:
        return train(start, store, tmp_path / folder, "cuda", Silent(), validate)

    whole = trained(start_run(recipe(6), store, "glyphs", tmp_path / "6", "cuda"), "6")
    trained(start_run(recipe(3), store, "glyphs", tmp_path / "3", "cuda"), "3")
    half = load_checkpoint(tmp_path / "3" / LAST)
    resumed = trained(replace(half, recipe=recipe(6)), "3")
    assert whole.provenance["engine"] == "fused"
    for key, value in whole.parameters.items():
        assert torch.equal(value, resumed.parameters[key]), key
    for key, value in whole.running.items():
        assert torch.equal(value, resumed.running[key]), key


@gpu
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("key", ["backbone.0.weight", "backbone.1.weight", "decoder.1.weight", "label.loc.bias"])
def test_what_is_not_a_number_is_noticed(precision: str, key: str) -> None:
    recipe = small("mini-5w1s")
    fused = make_learner(recipe, execution_for("cuda", "fused", precision, recipe))
    parameters = start_of(recipe)
    parameters[key][...] = gpu_nan()
    result = fused.gradient(parameters, on_gpu(made_up_tasks(recipe, 2)))
    assert not bool(result.losses["total"].isfinite().any())
