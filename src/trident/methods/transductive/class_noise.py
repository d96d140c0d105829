"""Standard normal noise of each class, made of the noise of its support images."""

from torch import Tensor

from trident.nn.classes import members_of
from trident.tasks.task import Task


def class_noise(noise: Tensor, task: Task) -> Tensor:
    """(task, n_support, size) -> (task, n_way, size).

    The sum over a class's images, divided by the square root of their number, is standard normal again. It goes with
    the images: neither the order of the classes nor that of the images matters.
    """
    members = members_of(task.support_labels, task.n_way, noise)  # (task, n_way, n_support)
    return (members / members.sum(2, keepdim=True).sqrt()) @ noise
