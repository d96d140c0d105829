"""Features of a frozen network, computed once and kept in a store, as a backbone for methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from trident.backbones.base import ALL, Backbone
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.nn.batch_norm import BatchNormStatistics, WithStatistics
from trident.nn.parameters import Parameters
from trident.settings import require, require_at_least, setting
from trident.tasks.task import Task


@dataclass(frozen=True)
class FrozenBackbone(Backbone):
    """A network trained elsewhere, which is not trained here. `trident data prepare --features` computes its features.

    The images of a task are these features already, so there is nothing left to compute.
    """

    has_batch_norm: ClassVar[bool] = False
    of: str = setting("efficientnet-lite0", "the network that computed the features: see 'trident backbones'")
    size: int = setting(1280, "number of features of one image", most=1_000_000)
    cells: int = setting(1, "cells of the feature map, whose features follow one another", most=100_000)
    fingerprint: str = setting("", "of that network, as 'trident backbones NAME' tells; a run fills in its store's")

    def __post_init__(self) -> None:
        require_at_least(self, "backbone", 1, "size", "cells")
        require(
            self.size % self.cells == 0,
            f"backbone.cells is {self.cells}: backbone.size, {self.size}, must be a multiple of it",
        )

    @property
    def numbers_per_image(self) -> int:
        return self.size

    @property
    def n_features(self) -> int:
        return self.size

    @property
    def n_cells(self) -> int:
        return self.cells

    def check_store(self, store: ImageStore) -> None:
        if store.features_of != self.of:
            content = f"features of {store.features_of}" if store.features_of else "pictures"
            raise TridentError(
                f"the store of {store.dataset} holds {content}, but the recipe takes features of {self.of}: make them "
                f"with 'trident data prepare --features {self.of}'"
            )
        self.check_fingerprint(store.features_fingerprint, f"the store of {store.dataset} was made with")
        if store.images.shape[1] != self.size:
            raise TridentError(
                f"the store of {store.dataset} has {store.images.shape[1]} features for each image, but "
                f"backbone.size is {self.size}"
            )

    def check_fingerprint(self, other: str, where: str) -> None:
        if other != self.fingerprint and "" not in (other, self.fingerprint):
            raise TridentError(
                f"{where} another version of {self.of} ({other[:12]}, not {self.fingerprint[:12]}). Make the store "
                "again, or train again if the run is older."
            )

    def initial(self, generator: torch.Generator) -> Parameters:
        return {}

    def initial_running(self) -> Parameters:
        return {}

    def __call__(
        self, parameters: Parameters, task: Task, statistics: BatchNormStatistics, rows: slice = ALL
    ) -> WithStatistics:
        features = task.images[:, rows]
        return (features if self.cells == 1 else features.reshape(*features.shape[:2], self.cells, -1)), {}

    def describe(self) -> str:
        return f"features of {self.of}"
