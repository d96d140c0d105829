"""The Conv4 backbone: four convolution blocks, trained here from scratch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from trident.backbones.base import ALL, Backbone
from trident.data.store import ImageStore
from trident.errors import TridentError
from trident.nn.batch_norm import BatchNormStatistics, WithStatistics
from trident.nn.conv4 import Conv4, feature_sizes, in_slices
from trident.nn.parameters import Parameters
from trident.settings import require, require_at_least, setting
from trident.tasks.task import Task

NAME = "backbone"  # its parameters are called backbone.0.weight and so on, whichever method uses it


@dataclass(frozen=True)
class Conv4Backbone(Backbone):
    """Conv4, the network of most few-shot papers: 84x84 images become 5x5 maps of `channels` features.

    With several branches there are as many such networks side by side, which share nothing. An image's features are
    those of all of them, one after another, so its map is `branches` maps, one below the other.
    """

    has_batch_norm: ClassVar[bool] = True
    image_size: int = setting(84, "height and width of the images in pixels", most=1024)
    image_channels: int = setting(3, "3 for colour, 1 for grey", most=3)
    channels: int = setting(32, "feature maps in each block", most=4096)
    activation: Literal["leaky_relu", "relu"] = setting("leaky_relu", "LeakyReLU(0.2) or ReLU, after every block")
    branches: int = setting(1, "networks side by side, each with its own weights", most=64)

    def __post_init__(self) -> None:
        require_at_least(self, "backbone", 1, "channels", "branches")
        require(
            self.image_size >= 16, f"backbone.image_size is {self.image_size}: four poolings need at least 16 pixels"
        )
        require(self.image_channels in (1, 3), f"backbone.image_channels is {self.image_channels}: it must be 1 or 3")

    @property
    def network(self) -> Conv4:
        """The first branch: for most methods the only one."""
        return self.networks[0]

    @property
    def networks(self) -> tuple[Conv4, ...]:
        names = (NAME, *(f"{NAME}.branch{i}" for i in range(1, self.branches)))
        return tuple(self.encoder(name, self.channels) for name in names)

    def encoder(self, name: str, channels: int) -> Conv4:
        """A network like this backbone's with parameters and channels of its own."""
        return Conv4(name, self.image_channels, channels, self.activation)

    @property
    def map_size(self) -> int:
        return feature_sizes(self.image_size)[-1]

    @property
    def n_features(self) -> int:
        return self.channels * self.n_cells

    @property
    def n_cells(self) -> int:
        return self.branches * self.map_size**2

    def initial(self, generator: torch.Generator) -> Parameters:
        return {key: value for network in self.networks for key, value in network.initial(generator).items()}

    @property
    def numbers_per_image(self) -> int:
        return self.branches * self.image_size**2  # as many as pixels: a rough measure is enough

    def check_store(self, store: ImageStore) -> None:
        if store.features_of:
            raise TridentError(
                f"the store of {store.dataset} holds features of {store.features_of}, but conv4 takes pictures: "
                "prepare a store without --features"
            )
        wanted, stored = (self.image_size, self.image_channels), (store.image_size, store.image_channels)
        if wanted != stored:
            raise TridentError(
                f"the images of {store.dataset} are {stored[0]}x{stored[0]} with {_channels(stored[1])}, but the model "
                f"takes {wanted[0]}x{wanted[0]} with {_channels(wanted[1])}"
                f": train with backbone.image_size={stored[0]} backbone.image_channels={stored[1]}"
                + (f", or prepare the store with --image-size {wanted[0]}" if wanted[1] == stored[1] else "")
            )

    def initial_running(self) -> Parameters:
        return {key: value for network in self.networks for key, value in network.initial_running().items()}

    def __call__(
        self, parameters: Parameters, task: Task, statistics: BatchNormStatistics, rows: slice = ALL
    ) -> WithStatistics:
        """Feature maps (task, image, h, w, channel) of the images in `rows`, and the statistics batch norm saw."""
        images = first_layer_input(task)[:, rows]
        maps, seen = zip(*(network(parameters, images, statistics) for network in self.networks), strict=True)
        joined = maps[0] if len(maps) == 1 else torch.cat(maps, 2)
        return joined, {key: value for part in seen for key, value in part.items()}


def conv4_of(backbone: Backbone, who: str) -> Conv4Backbone:
    """The backbone, for those that can use conv4 only."""
    if not isinstance(backbone, Conv4Backbone):
        raise TridentError(f"{who} needs pictures and the conv4 backbone, not {backbone.describe()}")
    return backbone


def single_conv4(backbone: Backbone, who: str) -> Conv4Backbone:
    """The backbone, for those that can use conv4 with one branch only."""
    conv4 = conv4_of(backbone, who)
    require(conv4.branches == 1, f"backbone.branches is {conv4.branches}: it must be 1 for {who}")
    return conv4


def first_layer_input(task: Task) -> Tensor:
    """The first layer's input: patches, cached for all inner steps, or pixels if patches need too much memory."""
    return task.pixels if in_slices(task.images.shape[1]) else task.patches


def _channels(number: int) -> str:
    return f"{number} channel{'s' if number > 1 else ''}"
