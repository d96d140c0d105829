"""For tests that need an NVIDIA GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trident.tasks.task import Batch, Labels

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA GPU here, which the fused engine is written for"
)


def gpu_nan() -> Tensor:
    """As NVIDIA's GPUs write what is not a number: all bits but the sign."""
    return torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cuda").view(torch.float32)


def on_gpu(batch: Batch, dtype: torch.dtype | None = None) -> Batch:
    """A batch of uint8 images on the GPU: as it is, or with pixels and noise of another type."""
    task, labels = batch
    images, noise = task.images.cuda(), {name: values.cuda() for name, values in task.noise.items()}
    if dtype is not None:
        images, noise = images.to(dtype) / 255, {name: values.to(dtype) for name, values in noise.items()}
    classes = None if labels.training_classes is None else labels.training_classes.cuda()
    return Batch(
        replace(task, images=images, support_labels=task.support_labels.cuda(), noise=noise),
        Labels(labels.queries.cuda(), classes),
    )
