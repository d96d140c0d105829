"""Whole meta-gradients of the fused engine against the plain one in float64. Needs an NVIDIA GPU."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from conftest import doubles, one_task
from gpu import gpu, gpu_nan
from trident.bench.benchmarks import relative_error
from trident.bench.made_up import made_up_tasks
from trident.data.glyphs import open_glyphs
from trident.engines.execution import AnyLearner, Execution, execution_for, make_learner
from trident.learning.checkpoint import LAST, Checkpoint, load_checkpoint
from trident.learning.inner_loop import Learner, TaskBatch
from trident.learning.run_start import start_run
from trident.learning.training import train
from trident.measuring.evaluate import Evaluation
from trident.measuring.prediction import predict
from trident.methods.trident.network import Noise, TaskImages
from trident.recipes import load_recipe
from trident.settings import Recipe, Views


def on_gpu(tasks: TaskBatch, dtype: torch.dtype | None = None) -> TaskBatch:
    def moved(x: Tensor) -> Tensor:
        return x.cuda() if dtype is None else x.cuda().to(dtype)

    stored = tasks.images.stored.cuda() if dtype is None else tasks.images.stored.cuda().to(dtype) / 255
    return TaskBatch(
        TaskImages(stored, tasks.support_labels.cuda()),
        tasks.query_labels.cuda(),
        tuple(Noise(*map(moved, noise)) for noise in tasks.support_noise),
        tuple(Noise(*map(moved, noise)) for noise in tasks.query_noise),
        None if tasks.query_classes is None else tasks.query_classes.cuda(),
    )


def small(name: str, *settings: str) -> Recipe:
    recipe = load_recipe(name, ["adaptation.steps=2", "episode.n_query=3", *settings])
    if name == "glyphs":
        return recipe
    return replace(recipe, model=replace(recipe.model, image_size=44))


VARIANTS = [
    ("mini-5w1s", []),
    ("mini-5w5s", ["adaptation.rate=1e-4"]),
    ("tiered-5w1s", ["adaptation.rate=1e-4"]),
    ("tiered-5w5s", ["adaptation.rate=1e-4", "model.attention_scale=outside"]),
    ("glyphs", []),
    ("mini-5w5s", ["adaptation.rate=1e-4", "model.classifier_start=prototypes", "objective.reconstruction_weight=0"]),
    ("mini-5w1s", ["adaptation.optimizer=adam", "adaptation.rate=1e-4"]),
    ("mini-5w1s", ["model.classifier_start=prototypes", "model.attfex=off"]),
    ("mini-5w1s", ["adaptation.order=first"]),
    ("mini-5w1s", ["model.method=protonet"]),
    ("mini-5w1s", ["model.attfex=set", "model.classifier_start=prototypes", "adaptation.refinements=2"]),
    ("mini-5w5s", ["adaptation.rate=1e-4", "model.attfex=set", "model.attfex_pooling=classes"]),
    ("mini-5w1s", ["adaptation.steps=0", "model.channels=16", "model.log_var_bound=4"]),
    ("mini-5w1s", ["adaptation.steps=0", "model.classifier_start=prototypes", "model.attfex=set"]),
    ("mini-5w1s", ["model.channels=16", "model.label_channels=32", "model.training_classes=5"]),
]


@gpu
@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_the_meta_gradient_is_the_plain_one(name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Adam divides by the gradient's size. Where that is nearly nothing rounding decides: with its usual 1e-8, weights
    # moved by a millionth change a float64 meta-gradient by a hundredth and more. With 1e-2 there is a right answer.
    monkeypatch.setattr("trident.learning.inner_loop.ADAM_EPSILON_ROOT", 1e-4)
    recipe = small(name, *settings)
    plain, fused = (make_learner(recipe, Execution("cuda", engine)) for engine in ("plain", "fused"))
    tasks = made_up_tasks(recipe, 3)
    parameters = {key: value.cuda() for key, value in plain.model.initial(0).items()}
    exact = plain.meta_gradient(doubles(parameters), on_gpu(tasks, torch.float64))
    found = fused.meta_gradient(parameters, on_gpu(tasks))
    again = fused.meta_gradient(parameters, on_gpu(tasks))
    for part, expected in zip(found.loss, exact.loss, strict=True):
        torch.testing.assert_close(part.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.accuracy, exact.accuracy)
    assert found.statistics.keys() == exact.statistics.keys()
    for key, value in exact.statistics.items():
        torch.testing.assert_close(found.statistics[key].double(), value, rtol=1e-3, atol=1e-4)
    for key, value in found.gradient.items():
        assert torch.equal(value, again.gradient[key]), f"{key} is not reproducible"

    def error(learner: AnyLearner, task: TaskBatch) -> float:
        exact = plain.meta_gradient(doubles(parameters), on_gpu(task, torch.float64)).gradient
        return relative_error(doubles(learner.meta_gradient(parameters, on_gpu(task)).gradient), exact)

    # The network has kinks: rounding that crosses one turns a gradient by a thousandth or so, in either engine. Few
    # tasks lie so near to one, a wrong gradient would be wrong in all of them.
    apart = [one_task(made_up_tasks(recipe, 5), index) for index in range(5)]
    fused_error, plain_error = (median(error(learner, task) for task in apart) for learner in (fused, plain))
    print(f"\n{name} {settings}: fused {fused_error:.1e}, plain float32 {plain_error:.1e}")
    assert fused_error < max(3e-4, 3 * plain_error)


@gpu
@pytest.mark.parametrize("name", ["mini-5w1s", "glyphs"])
def test_a_task_that_blows_up_spoils_nothing_else(name: str) -> None:
    recipe = small(name)
    fused = make_learner(recipe, Execution("cuda", "fused"))
    tasks = on_gpu(made_up_tasks(recipe, 3))
    parameters = {key: value.cuda() for key, value in make_learner(recipe, Execution("cuda")).model.initial(0).items()}
    noise = Noise(*(x.clone() for x in tasks.query_noise[0]))
    noise.label[1] = float("inf")
    broken = fused.meta_gradient(parameters, tasks._replace(query_noise=(noise,)))
    assert broken.finite.tolist() == [True, False, True]
    apart = [fused.meta_gradient(parameters, one_task(tasks, task)).gradient for task in (0, 2)]
    for key, value in broken.gradient.items():
        torch.testing.assert_close(value, apart[0][key] + apart[1][key], rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["mini-5w1s", "mini-5w5s"])
def test_low_precision_stays_near(name: str, precision: str) -> None:
    recipe = small(name, "adaptation.rate=1e-4")
    plain = make_learner(recipe, Execution("cuda", "plain", "tf32"))
    fused = make_learner(recipe, execution_for("cuda", "fused", precision, recipe))
    tasks = made_up_tasks(recipe, 8)
    parameters = {key: value.cuda() for key, value in plain.model.initial(0).items()}
    exact = plain.meta_gradient(doubles(parameters), on_gpu(tasks, torch.float64)).gradient
    plain_error = relative_error(doubles(plain.meta_gradient(parameters, on_gpu(tasks)).gradient), exact)
    error = relative_error(doubles(fused.meta_gradient(parameters, on_gpu(tasks)).gradient), exact)
    print(f"\n{name}: fused {precision} {error:.1e}, plain tf32 {plain_error:.1e}")
    assert error < (8 if precision == "bf16" else 1.5) * plain_error


@gpu
def test_half_precision_holds_gradients_that_grow_on_their_way_through_the_decoder() -> None:
    # Training makes them grow: by 3,000 in a run on miniImageNet. Small features before a batch norm do the same.
    recipe = small("mini-5w5s", "adaptation.rate=1e-5")
    plain = make_learner(recipe, Execution("cuda", "plain", "tf32"))
    fused = make_learner(recipe, execution_for("cuda", "fused", "fp16", recipe))
    tasks = made_up_tasks(recipe, 4)
    parameters = {
        key: (value / 64 if key.startswith("decoder.linear.") else value).cuda()
        for key, value in plain.model.initial(0).items()
    }
    exact = plain.meta_gradient(doubles(parameters), on_gpu(tasks, torch.float64)).gradient
    plain_error = relative_error(doubles(plain.meta_gradient(parameters, on_gpu(tasks)).gradient), exact)
    found = fused.meta_gradient(parameters, on_gpu(tasks))
    assert found.finite.all()
    error = relative_error(doubles(found.gradient), exact)
    print(f"\nfused fp16 {error:.1e}, plain tf32 {plain_error:.1e}")
    assert error < 2 * plain_error


@gpu
def test_adapting_and_predicting_are_the_plain_ones() -> None:
    recipe = small("mini-5w1s")
    plain, fused = (make_learner(recipe, Execution("cuda", engine)) for engine in ("plain", "fused"))
    tasks = on_gpu(made_up_tasks(recipe, 3))
    parameters = {key: value.cuda() for key, value in plain.model.initial(0).items()}
    assert isinstance(fused, Learner) and isinstance(plain, Learner)
    steps, expected_steps = fused.adapt(parameters, tasks), plain.adapt(parameters, tasks)
    assert len(steps) == len(expected_steps) == 3
    assert relative_error(steps[-1][0], expected_steps[-1][0]) < 1e-4
    for views in (Views(), Views(mirrored=True, corners=True)):
        found, expected = (predict(learner, parameters, tasks, views) for learner in (fused, plain))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Silent:
    def on_step(self, step: int, values: dict[str, float]) -> None: ...

    def on_validation(self, step: int, evaluation: Evaluation, best: bool) -> None: ...


@gpu
def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    store = open_glyphs()
    sizes = ["training.tasks_per_step=6", "training.tasks_per_chunk=4", "training.validation_tasks=4"]

    def recipe(steps: int) -> Recipe:
        return load_recipe("glyphs", [*sizes, f"training.steps={steps}", "training.schedule=constant"])

    def trained(start: Checkpoint) -> Checkpoint:
        return train(start, store, tmp_path / str(start.recipe.training.steps), "cuda", Silent())

    whole = trained(start_run(recipe(6), store, "glyphs", tmp_path / "6", "cuda"))
    trained(start_run(recipe(3), store, "glyphs", tmp_path / "3", "cuda"))
    half = load_checkpoint(tmp_path / "3" / LAST)
    resumed = train(replace(half, recipe=recipe(6)), store, tmp_path / "3", "cuda", Silent())
    assert whole.provenance["engine"] == "fused"
    for key, value in whole.parameters.items():
        assert torch.equal(value, resumed.parameters[key]), key


@gpu
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize(
    "key", ["label_encoder.0.weight", "label_encoder.1.weight", "decoder.1.weight", "label.loc.bias"]
)
def test_what_is_not_a_number_is_noticed(precision: str, key: str) -> None:
    recipe = small("mini-5w1s")
    fused = make_learner(recipe, execution_for("cuda", "fused", precision, recipe))
    parameters = {name: value.cuda() for name, value in fused.model.initial(0).items()}
    parameters[key][...] = gpu_nan()
    result = fused.meta_gradient(parameters, on_gpu(made_up_tasks(recipe, 2)))
    assert not bool(result.loss.total.isfinite().any())
