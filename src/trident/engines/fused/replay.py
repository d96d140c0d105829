"""CUDA graphs: a gradient of a thousand small kernels, launched as one.

The first call of a shape runs the kernels one by one (which compiles them), then records them; later calls copy their
inputs to where the recording reads them and replay it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trident.engines.learner import Gradient, matrix_products
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch, Labels, Task

Compute = Callable[[Parameters, Batch], Gradient]


class Replay:
    """One recorded gradient, for inputs of one shape."""

    def __init__(self, compute: Compute, parameters: Parameters, batch: Batch, pool: Any = None):
        """`pool` is another recording's memory, to be shared; results are copied out of it at once."""
        self.parameters = {key: value.detach().clone() for key, value in parameters.items()}
        self.batch = _copied(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(self.parameters, self.batch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = compute(self.parameters, self.batch)
        self.pool = self.graph.pool()

    def __call__(self, parameters: Parameters, batch: Batch) -> Gradient:
        torch._foreach_copy_(
            [*self.parameters.values(), *tensors_of(self.batch)],
            [*(parameters[key].detach() for key in self.parameters), *tensors_of(batch)],
        )
        self.graph.replay()
        result = self.result
        return Gradient(  # copies: the next replay overwrites what the recording made
            {key: value.clone() for key, value in result.gradient.items()},
            {name: part.clone() for name, part in result.losses.items()},
            result.accuracy.clone(),
            {key: value.clone() for key, value in result.statistics.items()},
            result.finite.clone(),
        )


class Recordings:
    """A recording for each shape of tasks, made when it first comes."""

    def __init__(self) -> None:
        self.by_shape: dict[tuple[Any, ...], Replay] = {}

    def __call__(self, compute: Compute, parameters: Parameters, batch: Batch) -> Gradient:
        device, shape = batch.task.device, signature(batch)
        if device.type != "cuda":
            return compute(parameters, batch)
        with torch.cuda.device(device):
            if shape not in self.by_shape:
                other = next(iter(self.by_shape.values()), None)  # one memory serves all: they never run together
                self.by_shape[shape] = Replay(compute, parameters, batch, other and other.pool)
            return self.by_shape[shape](parameters, batch)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Without gradients, and on the tasks' GPU: Triton launches on the current one, whichever holds the tensors."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.no_grad(), matrix_products(precision, device):
        yield


def tensors_of(batch: Batch) -> list[Tensor]:
    task, labels = batch
    truth = [part for part in labels if part is not None]
    return [task.images, task.support_labels, *task.noise.values(), *truth]


def signature(batch: Batch) -> tuple[Any, ...]:
    """What must be the same for a recording to serve."""
    return (batch.task.n_way, *((x.shape, x.dtype, x.device) for x in tensors_of(batch)))


def _copied(batch: Batch) -> Batch:
    task, labels = batch
    noise = {name: values.clone() for name, values in task.noise.items()}
    return Batch(
        Task(task.images.clone(), task.support_labels.clone(), task.n_way, noise),
        Labels(labels.queries.clone(), None if labels.training_classes is None else labels.training_classes.clone()),
    )
