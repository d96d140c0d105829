"""One code path on CPU and GPU: the same seed and noise give the same meta-step. Needs a CUDA GPU."""

import pytest
import torch

from gpu import on_gpu
from trident.bench.benchmarks import relative_error
from trident.bench.made_up import made_up_tasks
from trident.engines.execution import Execution
from trident.learning.learners import make_learner
from trident.nn.parameters import on_device
from trident.recipes.loading import load_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


# The other recipes start so sharply curved that float32 cannot tell their meta-gradient to 1e-2 on any device: between
# float32 and float64 on one CPU it moves by 3e-2 and more. docs/log.md has the figures.
@pytest.mark.parametrize("name", ["mini-5w1s", "glyphs", "glyphs-matching"])
def test_the_same_meta_step_on_cpu_and_gpu(name: str) -> None:
    recipe = load_recipe(name)
    learner = make_learner(recipe, Execution())
    parameters, batch = recipe.initial(0), made_up_tasks(recipe, 2)
    cpu = learner.gradient(parameters, batch)
    gpu = learner.gradient(on_device(parameters, "cuda"), on_gpu(batch))
    expected, found = cpu.losses["total"], gpu.losses["total"].cpu()
    loss_error = float(((found - expected) / expected).abs().max())
    gradient_error = relative_error(on_device(gpu.gradient, "cpu"), cpu.gradient)
    print(f"\n{name}: relative error of the loss {loss_error:.1e}, of the meta-gradient {gradient_error:.1e}")
    assert loss_error < 1e-4
    assert gradient_error < 1e-2
