"""The exact meta-gradient against finite differences."""

import torch

from trident.engines.plain.inner_loop import InnerLoopLearner
from trident.methods.inner_loop.base import Inputs
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch


def query_loss_after_adaptation(learner: InnerLoopLearner, parameters: Parameters, batch: Batch) -> float:
    task, labels = batch
    adapted, _ = learner.adapt(parameters, task)[-1]
    with torch.no_grad():
        found = learner.model.loss(adapted, Inputs(task, learner.statistics(task), labels=labels))
    return float(found.losses["total"].sum())


def directional_derivative(
    learner: InnerLoopLearner, parameters: Parameters, batch: Batch, along: Parameters, step: float
) -> float:
    one, other = (
        {key: value + distance * along[key] for key, value in parameters.items()} for distance in (step, -step)
    )
    difference = query_loss_after_adaptation(learner, one, batch) - query_loss_after_adaptation(learner, other, batch)
    return difference / (2 * step)


def assert_exact(learner: InnerLoopLearner, parameters: Parameters, batch: Batch, directions: int = 2) -> None:
    """The meta-gradient against finite differences, along random directions."""
    gradient = learner.gradient(parameters, batch).gradient
    generator = torch.Generator().manual_seed(5)
    # Along a random direction. One whose derivative is by chance almost nothing would show rounding only.
    usual = float(torch.cat([value.flatten() for value in gradient.values()]).square().mean().sqrt())
    for _ in range(directions):
        along = {
            key: torch.randn(value.shape, generator=generator, dtype=value.dtype) for key, value in parameters.items()
        }
        length = torch.stack([value.norm() for value in along.values()]).norm()
        along = {key: value / length for key, value in along.items()}
        actual = float(sum((gradient[key] * along[key]).sum() for key in gradient))
        # The network has kinks. A long step may cross one, a short one drowns small derivatives in rounding; a wrong
        # gradient agrees with neither.
        assert any(
            abs(actual - expected) < 1e-6 * max(abs(expected), 0.1 * usual)
            for expected in (directional_derivative(learner, parameters, batch, along, step) for step in (1e-6, 1e-7))
        )
