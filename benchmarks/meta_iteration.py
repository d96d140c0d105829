"""Time one meta-iteration on the CPU against a plain task-after-task autograd loop, in the same run.

`python benchmarks/meta_iteration.py --tasks 2 --size 84 --steps 5` (the defaults); made-up images, no data needed.
"""

import argparse
import math
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from plain_loop import plain_meta_gradient

from trident.adapt import Learner, TaskBatch
from trident.data.store import class_table, store_in_memory
from trident.episodes import EpisodeSampler, Protocol
from trident.model import Trident
from trident.nn.parameters import Parameters
from trident.recipes import load_recipe
from trident.settings import Recipe
from trident.tasks import TaskSource


def random_tasks(recipe: Recipe, n_tasks: int) -> TaskBatch:
    size, channels = recipe.model.image_size, recipe.model.image_channels
    per_class = recipe.episode.n_shot + recipe.episode.n_query
    classes = class_table((f"class {i}", "train", per_class) for i in range(recipe.episode.n_way))
    # Blocks with a little noise: as smooth as photographs, which keeps float32 closer to float64 than noise would.
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 236, (len(classes) * per_class, 7, 7, channels))
    blocks = blocks.repeat(-(-size // 7), 1).repeat(-(-size // 7), 2)[:, :size, :size]
    images = (blocks + generator.integers(0, 20, blocks.shape)).astype(np.uint8)
    sampler = EpisodeSampler(store_in_memory("random", images, classes), "train", recipe.episode, Protocol())
    return TaskSource(sampler, recipe.model, recipe.adaptation, 0, "train").batch(range(n_tasks))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of some runs after one for warming up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def relative_error(actual: Parameters, expected: Parameters) -> float:
    difference = sum(float((actual[key] - expected[key]).square().sum()) for key in expected)
    return math.sqrt(difference / sum(float(value.square().sum()) for value in expected.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mini-5w1s")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--size", type=int, default=84)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, [f"adaptation.steps={arguments.steps}"])
    recipe = replace(recipe, model=replace(recipe.model, image_size=arguments.size))
    learner = Learner(Trident(recipe.model, recipe.episode), recipe.objective, recipe.adaptation)
    parameters, tasks = learner.model.initial(0), random_tasks(recipe, arguments.tasks)

    ours = seconds(lambda: learner.meta_gradient(parameters, tasks), arguments.repeats)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    plain = seconds(lambda: plain_meta_gradient(parameters, tasks, recipe), arguments.repeats)
    plain_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    error = relative_error(
        learner.meta_gradient(parameters, tasks).gradient, plain_meta_gradient(parameters, tasks, recipe)[0]
    )
    print(
        f"{recipe.name} at {arguments.size}x{arguments.size}, {arguments.tasks} tasks, {arguments.steps} second-order "
        f"inner steps, float32, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"trident     {ours:8.2f} s   peak memory of the process {memory:7.0f} MiB")
    print(f"plain loop  {plain:8.2f} s   peak memory of the process {plain_memory:7.0f} MiB")
    print(f"ratio       {plain / ours:8.2f}     relative difference of the meta-gradients {error:.1e}")


if __name__ == "__main__":
    main()
