"""MAML and its relatives, with few steps and random tasks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import TINY_BACKBONE, TINY_EPISODE, doubles, initial, tiny_tasks
from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.methods.inner_loop.abml import Abml
from trident.methods.inner_loop.adapted_conv4 import AdaptedConv4
from trident.methods.inner_loop.anil import Anil
from trident.methods.inner_loop.bmaml import BayesianMaml
from trident.methods.inner_loop.boil import Boil
from trident.methods.inner_loop.maml import Maml
from trident.methods.inner_loop.platipus import Platipus
from trident.methods.inner_loop.vampire import Vampire
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch, Task

FEW: dict[str, Any] = {"inner_rate": 0.05, "inner_steps": 2, "training_inner_steps": 2}
RANDOM: dict[str, Any] = {**FEW, "initial_log_var": -4.0, "kl_weight": 1e-3}
METHODS: dict[str, AdaptedConv4] = {
    "maml": Maml(**FEW),
    "anil": Anil(**FEW),
    "boil": Boil(inner_rate=0.1),
    "abml": Abml(**RANDOM, hyper_prior_weight=1e-4),
    "vampire": Vampire(**RANDOM),
    "platipus": Platipus(**RANDOM, initial_step=0.05),
    "bmaml": BayesianMaml(**FEW, particles=4),
}
RANDOM_WEIGHTS = ("abml", "vampire", "platipus")
methods = pytest.mark.parametrize("name", list(METHODS))


def learner_of(name: str, batch_norm: str = "transductive", **settings: Any) -> tuple[InnerLoopLearner, Parameters]:
    """With random weights in float64, and random statistics of training."""
    model = replace(METHODS[name], **settings).model(TINY_BACKBONE, TINY_EPISODE)
    generator = torch.Generator().manual_seed(4)
    running = {
        key: 0.5 + torch.rand(value.shape, generator=generator, dtype=torch.float64)
        for key, value in model.initial_running().items()
    }
    return InnerLoopLearner(model, batch_norm, running), doubles(initial(model, 1))


def tasks_for(learner: InnerLoopLearner, predictions: int = 1, sampled: bool = True, seed: int = 0) -> Batch:
    """Random tasks in float64 with this learner's noise, which is zero if it is not sampled."""
    task, labels = tiny_tasks(seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    noise = {
        shape: torch.randn((task.n_tasks, *size), generator=generator, dtype=torch.float64) * float(sampled)
        for shape, size in learner.model.noise_shapes(TINY_EPISODE, predictions).items()
    }
    return Batch(replace(task, noise=noise), labels)


def images_of(task: Task, index: int) -> tuple[Tensor, Tensor]:
    pixels = task.images[index].permute(0, 3, 1, 2)
    return pixels[task.support], pixels[task.queries]


def plain_network(weights: Parameters, images: Tensor) -> Tensor:
    """Conv4 and a linear layer with torch's own functions, channels first."""
    for block in range(4):
        name = f"backbone.{block}"
        images = F.conv2d(images, weights[f"{name}.weight"].permute(3, 2, 0, 1), weights[f"{name}.bias"], padding=1)
        gain, shift = weights[f"{name}.norm.gain"], weights[f"{name}.norm.shift"]
        images = F.leaky_relu(F.batch_norm(images, None, None, gain, shift, training=True), 0.2)
        images = F.max_pool2d(images, 2)
    return F.linear(images.permute(0, 2, 3, 1).flatten(1), weights["head.weight"], weights["head.bias"])


def plain_adaptation(
    start: Parameters, support: Tensor, labels: Tensor, steps: int, rate: float, moves: str, second: bool
) -> Parameters:
    weights = dict(start)
    for _ in range(steps):
        moving = {key: value for key, value in weights.items() if key.startswith(moves)}

        def loss(moving: Parameters, fixed: Parameters = weights) -> Tensor:
            return F.cross_entropy(plain_network(fixed | moving, support), labels)

        gradient = torch.func.grad(loss)(moving)
        weights |= {key: value - rate * (g if second else g.detach()) for (key, value), g in _pairs(moving, gradient)}
    return weights


def _pairs(one: Parameters, other: Parameters) -> list[tuple[tuple[str, Tensor], Tensor]]:
    return [((key, value), other[key]) for key, value in one.items()]
