"""The state of a training run, saved in the run's folder, and the outer step that changes it: clipping and Adam."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trident.distributed.processes import Processes, shared
from trident.engines.learner import Gradient
from trident.errors import LostProcessError
from trident.learning.checkpoint import BEST, LAST, MOMENTS, Checkpoint, save_checkpoint
from trident.learning.run_log import Validated
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
    factor = 1 / tasks
    if settings.clip_norm is not None:
        clipped = norm if settings.clip_applies_to == "sum" else norm / tasks
        factor = min(1.0, settings.clip_norm / max(clipped, 1e-12)) / tasks
    scaled = torch._foreach_mul([gradient[key] for key in parameters], factor)
    for value, share in zip(parameters.values(), scaled, strict=True):
        value.grad = share
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    optimizer.step()


def make_optimizer(parameters: Parameters, start: Checkpoint) -> torch.optim.AdamW:
    settings, recipe = start.recipe.training, start.recipe
    shares = {key: settings.backbone_rate if key in recipe.backbone.names else 1.0 for key in parameters}  # of the rate
    decays = {key: settings.weight_decay if recipe.method.decays(key) else 0.0 for key in parameters}
    kinds = {key: (shares[key], decays[key]) for key in parameters}
    groups: list[dict[str, Any]] = []
    for share, decay in sorted(set(kinds.values())):
        own = [value for key, value in parameters.items() if kinds[key] == (share, decay)]
        groups.append({"params": own, "share": share, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, lr=settings.rate)
    if start.optimizer:
        state = optimizer.state_dict()
        state["state"] = {
            place: {name: start.optimizer[f"{name}/{key}"] for name in MOMENTS}
            | {"step": torch.tensor(float(start.step))}
            for place, key in enumerate(sorted(parameters, key=lambda key: kinds[key]))  # as in the groups
        }
        optimizer.load_state_dict(state)
    return optimizer


def optimizer_state(parameters: Parameters, optimizer: torch.optim.AdamW) -> Parameters:
    states = {key: cast(dict[str, Tensor], optimizer.state[value]) for key, value in parameters.items()}
    return {f"{name}/{key}": state[name] for key, state in states.items() for name in MOMENTS if name in state}


RUNNING_MOMENTUM = 0.01  # weight of a new step in the running statistics


class RunState:
    """Weights, running statistics, optimizer and the best validation so far. The first process writes the files."""

    def __init__(self, start: Checkpoint, out: Path, device: str, processes: Processes):
        self.start = start
        self.out = out
        self.processes = processes
        self.parameters = {key: value.to(device).requires_grad_() for key, value in start.parameters.items()}
        self.running = {key: value.to(device) for key, value in start.running.items()}
        self.optimizer = make_optimizer(self.parameters, start)
        self.step = start.step
        self.best = start.best
        self.validated_step = start.validated_step
        if self._best_is_lost():  # the next validation writes it again, at once if this step has one
            self.best, self.validated_step = None, min(self.validated_step, self.step - 1)

    def checkpoint(self) -> Checkpoint:
        return replace(
            self.start,
            parameters=self.parameters,
            running=self.running,
            step=self.step,
            optimizer=optimizer_state(self.parameters, self.optimizer),
            best=self.best,
            validated_step=self.validated_step,
        )

    def save(self) -> None:
        # Processes on different kinds of hardware round differently, and would slowly drift apart.
        state = self.checkpoint()
        self.processes.copy_from_first([*self.parameters.values(), *state.optimizer.values(), *self.running.values()])
        if self.processes.first:
            save_checkpoint(self.out / LAST, state)

    @contextmanager
    def saved_if_a_process_is_lost(self) -> Iterator[None]:
        try:
            yield
        except LostProcessError as error:
            if self.processes.first:
                save_checkpoint(self.out / LAST, self.checkpoint())
            kept = f"the state after step {self.step} is kept in {self.out / LAST}"
            raise shared(LostProcessError(f"{error}; {kept}")) from error

    def record_validation(self, result: Validated) -> bool:
        """Record a validation of these weights, and save them if they are the best so far. Returns whether they are."""
        self.validated_step = self.step
        is_best = self.best is None or self._best_is_lost() or result.accuracy > self.best["accuracy"]
        if is_best:
            self.best = {"step": self.step, **result.for_log()}
            if self.processes.first:
                save_checkpoint(self.out / BEST, replace(self.checkpoint(), optimizer={}))
        return is_best

    def _best_is_lost(self) -> bool:
        return self.processes.from_first(lambda: self.best is not None and not (self.out / BEST).is_file())

    def update(self, result: Gradient, norm: float, left_out: int, rate: float) -> None:
        """One step along a gradient of this norm, from which some tasks were left out because they are not finite."""
        counted = len(result.finite) - left_out
        settings = self.start.recipe.training
        update(self.parameters, self.optimizer, result.gradient, norm, counted, rate, settings)
        self.running = _updated_statistics(self.running, result, self.step, bool(left_out))
        self.step += 1


def _updated_statistics(running: Parameters, result: Gradient, step: int, left_out: bool) -> Parameters:
    """Running statistics after a step: at first a plain average, so that the initial values do not count."""
    if not result.statistics:
        return running
    seen = {key: value[result.finite] if left_out else value for key, value in result.statistics.items()}
    moved = torch._foreach_lerp(
        [running[key] for key in seen],
        [value.mean(0) for value in seen.values()],
        max(RUNNING_MOMENTUM, 1 / (step + 1)),
    )
    return running | dict(zip(seen, moved, strict=True))
