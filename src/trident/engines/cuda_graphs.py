"""CUDA graphs: the thousand small kernels of a gradient, launched as one.

The first call with a shape runs the kernels one by one, which compiles them, and then records them. Later calls copy
their inputs into the recording's buffers and replay it.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trident.engines.learner import Gradient, Learner
from trident.nn.parameters import Parameters
from trident.tasks.task import Batch, Labels, Task, tensors_of

Compute = Callable[[Parameters, Batch], Gradient]


class Replay:
    """One recorded gradient, for inputs of one shape."""

    def __init__(self, compute: Compute, parameters: Parameters, batch: Batch, pool: Any = None):
        """`pool` is another recording's memory, to be shared. Results are copied out of it at once."""
        self.parameters = {key: value.detach().clone() for key, value in parameters.items()}
        self.batch = _copied(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(self.parameters, _without_cache(self.batch))
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        # Another thread may copy images to the GPU meanwhile; only this thread's calls belong to the recording.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = compute(self.parameters, _without_cache(self.batch))
        self.pool = self.graph.pool()

    def __call__(self, parameters: Parameters, batch: Batch) -> Gradient:
        torch._foreach_copy_(
            [*self.parameters.values(), *tensors_of(self.batch)],
            [*(parameters[key].detach() for key in self.parameters), *tensors_of(batch)],
        )
        self.graph.replay()
        result = self.result
        return Gradient(  # copies: the next replay overwrites the buffers
            {key: value.clone() for key, value in result.gradient.items()},
            {name: part.clone() for name, part in result.losses.items()},
            result.accuracy.clone(),
            {key: value.clone() for key, value in result.statistics.items()},
            result.finite.clone(),
        )


@dataclass(frozen=True)
class RecordedLearner(Learner):
    """Base of learners whose gradient is recorded on a GPU, once for each shape of tasks."""

    recordings: dict[tuple[Any, ...], Replay] = field(init=False, default_factory=dict, compare=False, repr=False)

    @abstractmethod
    def compute(self, parameters: Parameters, batch: Batch) -> Gradient:
        """The gradient, without a CUDA graph. It may not wait for the GPU, or depend on values other than tensors."""

    def gradient(self, parameters: Parameters, batch: Batch) -> Gradient:
        device, shape = batch.task.device, signature(batch)
        if device.type != "cuda":
            return self.compute(parameters, batch)
        with torch.cuda.device(device):
            if shape not in self.recordings:
                other = next(iter(self.recordings.values()), None)  # they never run together, so they share memory
                self.recordings[shape] = Replay(self.compute, parameters, batch, other and other.pool)
            return self.recordings[shape](parameters, batch)


def signature(batch: Batch) -> tuple[Any, ...]:
    """The key of a recording: it can be replayed for inputs with the same signature."""
    return (batch.task.n_way, *((x.shape, x.dtype, x.device) for x in tensors_of(batch)))


def _without_cache(batch: Batch) -> Batch:
    """A copy with these tensors: what a task caches must be computed inside the recording, or it would never change."""
    return batch._replace(task=replace(batch.task))


def _copied(batch: Batch) -> Batch:
    task, labels = batch
    noise = {name: values.clone() for name, values in task.noise.items()}
    return Batch(
        Task(task.images.clone(), task.support_labels.clone(), task.n_way, noise),
        Labels(labels.queries.clone(), None if labels.training_classes is None else labels.training_classes.clone()),
    )
