"""One code path on CPU and GPU: the same seed and noise give the same meta-step. Needs a CUDA GPU."""

import pytest
import torch

from conftest import doubles
from gpu import on_gpu
from trident.bench.benchmarks import relative_error
from trident.bench.made_up import made_up_tasks
from trident.engines.execution import Execution
from trident.learning.learners import make_learner
from trident.nn.parameters import on_device
from trident.recipes.loading import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


@pytest.mark.parametrize("name", ["mini-5w1s", "glyphs", "glyphs-matching"])
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
