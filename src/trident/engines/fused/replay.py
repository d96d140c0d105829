"""CUDA graphs: a meta-gradient of a thousand small kernels, launched as one.

The first call of a shape runs the kernels one by one (which compiles them), then records them; later calls copy their
inputs to where the recording reads them and replay it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trident.learning.inner_loop import MetaGradient, TaskBatch, matrix_products
from trident.methods.trident.network import Noise, TaskImages
from trident.methods.trident.objective import LossParts
from trident.nn.parameters import Parameters

Compute = Callable[[Parameters, TaskBatch], MetaGradient]


class Replay:
    """One recorded meta-gradient, for inputs of one shape."""

    def __init__(self, compute: Compute, parameters: Parameters, tasks: TaskBatch, pool: Any = None):
        """`pool` is another recording's memory, to be shared; results are copied out of it at once."""
        self.parameters = {key: value.detach().clone() for key, value in parameters.items()}
        self.tasks = _rebuilt(tasks, [x.clone() for x in tensors_of(tasks)])
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(self.parameters, self.tasks)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = compute(self.parameters, self.tasks)
        self.pool = self.graph.pool()

    def __call__(self, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        torch._foreach_copy_(
            [*self.parameters.values(), *tensors_of(self.tasks)],
            [*(parameters[key].detach() for key in self.parameters), *tensors_of(tasks)],
        )
        self.graph.replay()
        result = self.result
        return MetaGradient(  # copies: the next replay overwrites what the recording made
            {key: value.clone() for key, value in result.gradient.items()},
            LossParts(*(part.clone() for part in result.loss)),
            result.accuracy.clone(),
            {key: value.clone() for key, value in result.statistics.items()},
            result.finite.clone(),
        )


class Recordings:
    """A recording for each shape of tasks, made when it first comes."""

    def __init__(self) -> None:
        self.by_shape: dict[tuple[Any, ...], Replay] = {}

    def __call__(self, compute: Compute, parameters: Parameters, tasks: TaskBatch) -> MetaGradient:
        device, shape = tasks.query_labels.device, signature(tasks)
        if device.type != "cuda":
            return compute(parameters, tasks)
        with torch.cuda.device(device):
            if shape not in self.by_shape:
                other = next(iter(self.by_shape.values()), None)  # one memory serves all: they never run together
                self.by_shape[shape] = Replay(compute, parameters, tasks, other and other.pool)
            return self.by_shape[shape](parameters, tasks)


@contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """Without gradients, and on the tasks' GPU: Triton launches on the current one, whichever holds the tensors."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.no_grad(), matrix_products(precision, device):
        yield


def tensors_of(tasks: TaskBatch) -> list[Tensor]:
    noises = (*tasks.support_noise, *tasks.query_noise)
    classes = [] if tasks.query_classes is None else [tasks.query_classes]
    labels = [tasks.support_labels, tasks.query_labels]
    return [tasks.images.stored, *labels, *(x for noise in noises for x in noise), *classes]


def signature(tasks: TaskBatch) -> tuple[Any, ...]:
    """What must be the same for a recording to serve."""
    return tuple((x.shape, x.dtype, x.device) for x in tensors_of(tasks))


def _rebuilt(tasks: TaskBatch, tensors: list[Tensor]) -> TaskBatch:
    images, support_labels, query_labels, *noise = tensors
    classes = None if tasks.query_classes is None else noise.pop()
    pairs = [Noise(*noise[i : i + 2]) for i in range(0, len(noise), 2)]
    n = len(tasks.support_noise)
    return TaskBatch(TaskImages(images, support_labels), query_labels, tuple(pairs[:n]), tuple(pairs[n:]), classes)
