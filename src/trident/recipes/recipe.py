"""A recipe: all settings of a training run."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from trident.backbones.base import Backbone
from trident.backbones.conv4 import Conv4Backbone
from trident.backbones.frozen import FrozenBackbone
from trident.errors import TridentError
from trident.methods.base import HeadOnFeatures, Method, Model
from trident.methods.trident.network import Trident
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec, Protocol, TrainingSettings, Views


@dataclass(frozen=True)
class Recipe:
    name: str
    summary: str
    dataset: str
    episode: EpisodeSpec = EpisodeSpec()
    protocol: Protocol = Protocol()
    views: Views = Views()
    backbone: Backbone = Conv4Backbone()
    method: Method = field(default_factory=Trident)
    training: TrainingSettings = TrainingSettings()

    def __post_init__(self) -> None:
        if isinstance(self.backbone, FrozenBackbone) and self.views != Views():
            views = self.views.describe().removeprefix(", ") or "averaged features"
            raise TridentError(f"[views] asks for {views}: features have no views, only pictures do")
        if self.views.average == "features" and not isinstance(self.method, HeadOnFeatures):
            raise TridentError(f"views.average is 'features': {self.method.about.title} averages probabilities only")

    @cached_property
    def model(self) -> Model:
        """The recipe's method on its backbone, which knows its parameters but holds none."""
        return self.method.model(self.backbone, self.episode)

    def initial(self, seed: int) -> Parameters:
        """Random weights to start training from."""
        return self.model.initial(torch.Generator().manual_seed(seed))

    def shapes(self) -> Parameters:
        """Parameters on torch's meta device: their names, shapes and types without their values."""
        with torch.device("meta"):
            return self.model.initial(torch.Generator())

    def running_shapes(self) -> Parameters:
        with torch.device("meta"):
            return self.model.initial_running()

    def in_training(self) -> "Recipe":
        """The recipe as training uses it: its tasks may be larger than those it is measured on."""
        n_way = self.training.task_ways or self.episode.n_way
        n_query = self.training.task_queries or self.episode.n_query
        episode = replace(self.episode, n_way=n_way, n_query=n_query, n_unlabelled=0, distractors=0)
        # Running statistics are gathered in training, which itself normalises with those of the batch, as usual.
        gathers = self.protocol.batch_norm == "running"
        protocol = replace(self.protocol, batch_norm="transductive") if gathers else self.protocol
        return replace(self, episode=episode, protocol=protocol, method=self.method.in_training(), views=Views())

    def describe_protocol(self) -> str:
        """How a prediction is made, in words: part of every result."""
        latents = bool(self.model.noise_shapes(self.episode, 1))
        protocol = self.protocol.describe(latents, self.backbone.has_batch_norm)
        how = (protocol, self.backbone.describe(), self.method.describe())
        return ", ".join(filter(None, how)) + self.views.describe()

    def check_all_at_once(self) -> None:
        """Check for analyses that need all queries of a task together."""
        if self.protocol.queries_at_once == "one":
            raise TridentError("protocol.queries_at_once is 'one': it works for accuracy and calibration only")
