"""The parts of TRIDENT's network: its layers, their parameters, and the noise that it needs."""

import re
from dataclasses import dataclass

import torch

from trident.backbones.conv4 import Conv4Backbone
from trident.methods.inner_loop.base import InnerLoopModel
from trident.methods.trident.settings import TridentSettings
from trident.nn.attfex import Attfex
from trident.nn.conv4 import Conv4, Decoder
from trident.nn.gaussian import GaussianHead
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec
from trident.tasks.source import NoiseShapes
from trident.tasks.task import Task

PROTOTYPE_SCALE = 0.1  # start of the learned scale of distances to prototypes
UNIT_SCALE = 7.0  # the same, between features of unit length


@dataclass(frozen=True)
class Parts(InnerLoopModel):
    """The names of a part's parameters begin with the part's name."""

    method: TridentSettings
    backbone: Conv4Backbone  # the label encoder
    episode: EpisodeSpec

    @property
    def semantic_encoder(self) -> Conv4:
        return self.backbone.encoder("semantic_encoder", self.semantic_channels)

    @property
    def semantic_channels(self) -> int:
        return self.method.semantic_channels or self.backbone.channels

    @property
    def semantic_head(self) -> GaussianHead:
        s = self.method
        inputs = self.semantic_encoder.n_features(self.backbone.image_size)
        return GaussianHead("semantic", inputs, s.semantic_latents, s.initial_log_var, s.log_var_bound)

    @property
    def label_head(self) -> GaussianHead:
        s = self.method
        inputs = self.backbone.n_features + (s.semantic_latents if s.label_reads_semantic else 0)
        return GaussianHead("label", inputs, s.label_latents, s.initial_log_var, s.log_var_bound)

    @property
    def attfex(self) -> Attfex | None:
        s = self.method
        if s.attfex == "off":
            return None
        return Attfex(
            "attfex",
            self.episode.n_images if s.attfex == "positional" else None,
            s.attfex_width_m,
            s.attfex_width_n,
            self.backbone.activation,
            s.attention_activation,
            s.attention_scale,
            s.attfex_residual,
        )

    @property
    def classifier(self) -> tuple[Linear, Linear]:
        s = self.method
        return (
            Linear("classifier.0", s.label_latents, s.classifier_width),
            Linear("classifier.1", s.classifier_width, self.episode.n_way),
        )

    @property
    def training_class_head(self) -> Linear | None:
        s = self.method
        return Linear("training_classes", s.classifier_width, s.training_classes) if s.training_classes else None

    @property
    def decoder(self) -> Decoder:
        s, b = self.method, self.backbone
        latents = s.label_latents + s.semantic_latents
        return Decoder(
            "decoder",
            latents,
            b.image_size,
            b.image_channels,
            self.semantic_channels,
            b.activation,
            s.decoder_batch_norm,
        )

    def initial(self, generator: torch.Generator) -> Parameters:
        """Random weights, without a task axis."""
        encoders = (self.semantic_encoder, self.semantic_head, self.backbone, self.label_head, self.attfex)
        parts = (*encoders, *self.classifier, self.training_class_head, self.decoder)
        start = {key: value for part in parts if part for key, value in part.initial(generator).items()}
        if self.method.classifier_start == "prototypes":
            del start["classifier.1.weight"], start["classifier.1.bias"]  # `prototype_classifier` makes them
            start[self._scale] = torch.tensor(UNIT_SCALE if self._unit else PROTOTYPE_SCALE)
        return start

    def initial_running(self) -> Parameters:
        encoders = self.semantic_encoder.initial_running() | self.backbone.initial_running()
        return encoders | self.decoder.initial_running()

    # Noise: standard normal for the latents, or zero, which gives their means.

    def noise_shapes(self, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        s = self.method
        # The start from prototypes needs noise even without inner steps.
        draws: list[tuple[str, int | str, int]] = [
            ("support", i, episode.n_support) for i in range(max(1, s.inner_steps))
        ]
        draws += [("query", i, episode.n_queries) for i in range(predictions)]
        if s.unlabelled_weight:
            draws += [("query", inner_draw(i), episode.n_queries) for i in range(s.inner_steps)]
        sizes = {"semantic": s.semantic_latents, "label": s.label_latents}
        return {f"{of}/{i}/{latent}": (n, size) for of, i, n in draws for latent, size in sizes.items()}

    def n_draws(self, task: Task) -> int:
        """How many draws of the queries' noise the tasks contain, for predictions."""
        return sum(bool(re.fullmatch(r"query/\d+/label", name)) for name in task.noise)

    @property
    def _unit(self) -> bool:
        return self.method.classifier_features == "unit"

    @property
    def _scale(self) -> str:
        """Two names, because a scale learned for one kind of features is useless for the other."""
        return "classifier.unit_scale" if self._unit else "classifier.scale"


def inner_draw(step: int | str) -> str:
    """The name of the draw of the queries' noise for an inner step."""
    return f"step{step}"
