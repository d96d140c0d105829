"""The interface of a backbone: it turns the images of a task into features."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from trident.data.store import ImageStore
from trident.nn.batch_norm import BatchNormStatistics, WithStatistics
from trident.nn.parameters import Parameters
from trident.tasks.task import Task

ALL = slice(None)


@dataclass(frozen=True)
class Backbone(ABC):
    """Base of the backbones that a recipe can name. Their fields are the keys of the recipe's [backbone] table."""

    has_batch_norm: ClassVar[bool]  # without it, no image changes the features of another, under any protocol

    @property
    @abstractmethod
    def numbers_per_image(self) -> int:
        """Number of values in an input image. It decides how many tasks are computed at once."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Number of features of an image."""

    @property
    def n_cells(self) -> int:
        """Number of cells of the feature map that these features come from."""
        return 1

    @abstractmethod
    def check_store(self, store: ImageStore) -> None:
        """Raise an error if the backbone cannot take the images of this store."""

    @abstractmethod
    def initial(self, generator: torch.Generator) -> Parameters: ...

    @abstractmethod
    def initial_running(self) -> Parameters: ...

    @abstractmethod
    def __call__(
        self, parameters: Parameters, task: Task, statistics: BatchNormStatistics, rows: slice = ALL
    ) -> WithStatistics:
        """Features (task, image, ...) of the images in `rows`, and the statistics that batch norm saw."""

    def describe(self) -> str:
        """For the protocol of a result; empty for a backbone that is trained here."""
        return ""

    @property
    def names(self) -> frozenset[str]:
        """The names of its parameters."""
        with torch.device("meta"):
            return frozenset(self.initial(torch.Generator()))
