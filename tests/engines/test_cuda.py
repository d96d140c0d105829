"""One code path on CPU and GPU: the same seed and noise give the same tasks and meta-step. Needs a CUDA GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import on_gpu
from studies.speed.benchmarks import relative_error
from studies.speed.made_up import made_up_tasks
from tiny import TINY_RECIPE, Silent, doubles, source_for, tiny_store
from trident.data.glyphs import open_glyphs
from trident.data.store import ImageStore
from trident.engines.execution import Execution, make_learner
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.learning.run_start import start_run
from trident.learning.step_gradient import training_source
from trident.learning.training import train
from trident.measuring.evaluate import validate
from trident.nn.parameters import on_device
from trident.recipes.loading import load_recipe
from trident.tasks.source import ClassSource, Source
from trident.tasks.task import tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


def tasks_of(store: ImageStore, **options: Any) -> Source:
    return source_for(TINY_RECIPE, store, **options)


def classes_of(store: ImageStore, **options: Any) -> Source:
    return ClassSource(store, 64, seed=1, **options)


@pytest.mark.parametrize("name", ["mini-5w1s", "glyphs", "glyphs-matching", "glyphs-epnet", "glyphs-tpn"])
def test_the_same_meta_step_on_cpu_and_gpu(name: str) -> None:
    """In float32 a meta-gradient of five steps is uncertain by a hundredth, so both are held against float64."""
    recipe = load_recipe(name)
    learner = make_learner(recipe, Execution())
    parameters, batch = recipe.initial(0), made_up_tasks(recipe, 2)
    on_the_gpu = on_device(parameters, "cuda")
    cpu = learner.gradient(parameters, batch)
    gpu = learner.gradient(on_the_gpu, on_gpu(batch))
    exact = learner.gradient(doubles(on_the_gpu), on_gpu(batch, torch.float64))
    expected, found = cpu.losses["total"], gpu.losses["total"].cpu()
    loss_error = float(((found - expected) / expected).abs().max())
    of_cpu = relative_error(doubles(on_device(cpu.gradient, "cuda")), exact.gradient)
    of_gpu = relative_error(doubles(gpu.gradient), exact.gradient)
    print(
        f"\n{name}: loss differs by {loss_error:.1e}; meta-gradients are off by {of_cpu:.1e} (CPU), {of_gpu:.1e} (GPU)"
    )
    assert loss_error < 1e-4
    assert of_gpu < 2 * of_cpu + 1e-3


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, []) for name in ("maml", "anil", "boil", "abml", "vampire", "platipus", "bmaml")),
        ("maml", ["method.inner_optimizer=adam"]),
        ("maml", ["method.inner_order=first"]),
        ("bmaml", ["method.chaser=true"]),
    ],
)
def test_a_recorded_gradient_is_the_same_for_other_tasks_and_weights(name: str, settings: list[str]) -> None:
    """The plain engine records the gradients of MAML and its relatives as CUDA graphs."""
    recipe = load_recipe(f"glyphs-{name}", settings).in_training()
    learner = make_learner(recipe, Execution("cuda"))
    assert isinstance(learner, InnerLoopLearner)
    source = training_source(recipe, open_glyphs(), "cuda")
    for step in range(3):
        parameters, batch = on_device(recipe.initial(step), "cuda"), source.batch([2 * step, 2 * step + 1])
        recorded, expected = learner.gradient(parameters, batch), learner.compute(parameters, batch)
        assert len(learner.recordings) == 1
        for found, plain in zip(recorded, expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [tasks_of, classes_of])
@pytest.mark.parametrize("augmentation", ["none", "crop_colour"])
def test_batches_from_host_memory_are_the_same(make: Callable[..., Source], augmentation: str) -> None:
    """Bit for bit, also when they are drawn ahead on another stream while the GPU is busy."""
    resident = make(replace(tiny_store(40, 84), keep_on="device"), device="cuda", augmentation=augmentation)
    gathered = make(replace(tiny_store(40, 84), keep_on="host"), device="cuda", augmentation=augmentation)
    assert gathered.images.gathers and not resident.images.gathers
    steps = [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(30)]
    expected = [resident.batch(indices) for indices in steps]
    busy = torch.randn(4096, 4096, device="cuda")
    upcoming = gathered.prefetch(steps[0])
    for place, batch in enumerate(expected):
        found = upcoming()
        upcoming = gathered.prefetch(steps[(place + 1) % len(steps)])
        for _ in range(5):
            busy = torch.tanh(busy @ busy)
        for one, other in zip(tensors_of(found), tensors_of(batch), strict=True):
            assert one.device == other.device and one.dtype == other.dtype
            assert torch.equal(one, other)
        assert torch.equal(gathered.batch(steps[place]).task.images, batch.task.images)
    upcoming()


@pytest.mark.parametrize("engine", ["plain", "fused"])
def test_training_from_host_memory_gives_the_same_weights(tmp_path: Path, engine: str) -> None:
    recipe = load_recipe("glyphs", ["training.steps=6", "training.validate_every=3", "training.validation_tasks=20"])
    ends = []
    for place in ("device", "host"):
        store = replace(open_glyphs(), keep_on=place)
        start = start_run(recipe, store, "glyphs", tmp_path / place, "cuda", engine, "fp32")
        ends.append(train(start, store, tmp_path / place, "cuda", Silent(), validate, engine, "fp32").parameters)
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-3, atol=1e-5)
