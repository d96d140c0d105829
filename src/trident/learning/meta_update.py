"""The outer step: clips the gradient and applies Adam. Adam's state goes into checkpoints."""

import math
from typing import cast

import torch
from torch import Tensor

from trident.learning.checkpoint import MOMENTS, Checkpoint
from trident.nn.parameters import Parameters
from trident.settings import TrainingSettings


def rate_at(settings: TrainingSettings, step: int) -> float:
    if settings.schedule == "constant":
        return settings.rate
    return settings.rate * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


def update(
    parameters: Parameters,
    optimizer: torch.optim.AdamW,
    gradient: Parameters,
    norm: float,
    tasks: int,
    rate: float,
    settings: TrainingSettings,
) -> None:
    """One step along the mean gradient of some tasks, given its sum over them and the norm of that sum."""
    if settings.clip_norm is None:
        factor = 1 / tasks
    elif settings.clip_applies_to == "sum":
        factor = min(1.0, settings.clip_norm / max(norm, 1e-12)) / tasks
    else:
        factor = min(1.0, settings.clip_norm / max(norm / tasks, 1e-12)) / tasks
    scaled = torch._foreach_mul([gradient[key] for key in parameters], factor)
    for value, share in zip(parameters.values(), scaled, strict=True):
        value.grad = share
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    optimizer.step()


def make_optimizer(parameters: Parameters, start: Checkpoint) -> torch.optim.AdamW:
    settings, method = start.recipe.training, start.recipe.method
    in_backbone = start.recipe.backbone.names
    kinds = {  # the share of the rate, and the weight decay
        key: (
            settings.backbone_rate if key in in_backbone else 1.0,
            settings.weight_decay if method.decays(key) else 0.0,
        )
        for key in parameters
    }
    groups = [
        {
            "params": [value for key, value in parameters.items() if kinds[key] == kind],
            "share": kind[0],
            "weight_decay": kind[1],
        }
        for kind in sorted(set(kinds.values()))
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.rate)
    if start.optimizer:
        state = optimizer.state_dict()
        state["state"] = {
            place: {
                "step": torch.tensor(float(start.step)),
                **{moment: start.optimizer[f"{moment}/{key}"] for moment in MOMENTS},
            }
            for place, key in enumerate(sorted(parameters, key=lambda key: kinds[key]))  # as in the groups
        }
        optimizer.load_state_dict(state)
    return optimizer


def optimizer_state(parameters: Parameters, optimizer: torch.optim.AdamW) -> Parameters:
    state: Parameters = {}
    for key, value in parameters.items():
        moments = cast(dict[str, Tensor], optimizer.state[value])
        state |= {f"{name}/{key}": moments[name] for name in MOMENTS if name in moments}
    return state
