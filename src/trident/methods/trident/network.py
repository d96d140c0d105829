"""TRIDENT (Algorithm 1 of the paper): images -> latents -> logits and reconstructions.

The generative story of an image x with label y:

    z_semantic ~ N(0, I)            what the image looks like: style, context
    z_label    ~ N(0, I)            what class it belongs to
    y ~ p(y | z_label)              the classifier
    x ~ p(x | z_label, z_semantic)  the decoder

Inference runs the other way with two intertwined networks: q(z_semantic | x), then q(z_label | x, z_semantic), where
AttFEX makes the second one aware of all images of the task.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.nn.activation import activate
from trident.nn.attfex import Attfex, Classes, Extractor, Moments, Positional, Seeds, TaskFeatures
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.classes import class_means, members_of
from trident.nn.conv4 import Conv4
from trident.nn.conv_layer import ConvLayer, many
from trident.nn.convolution import patches_of
from trident.nn.decoder import Decoder
from trident.nn.gaussian import Gaussian, GaussianHead
from trident.nn.linear import Linear
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec, ModelSettings

Target = Literal["support", "query"]
PROTOTYPE_SCALE = 0.1  # start of the learned scale of distances to prototypes
UNIT_SCALE = 7.0  # the same, between features of length 1


@dataclass(frozen=True)
class TaskImages:
    """The images of some tasks, the support set first."""

    stored: Tensor  # (task, n_images, height, width, channel): uint8, or floating point in 0 .. 1
    support_labels: Tensor  # (task, n_support) int64

    @property
    def n_support(self) -> int:
        return self.support_labels.shape[1]

    @cached_property
    def pixels(self) -> Tensor:
        """Values in 0 .. 1."""
        return self.stored.float() / 255 if self.stored.dtype == torch.uint8 else self.stored

    @cached_property
    def patches(self) -> Tensor:
        """(task, n_images, height, width, 9 * channel)."""
        return patches_of(self.pixels)

    @property
    def for_encoders(self) -> Tensor:
        """What the plain encoders' first layers read: patches, or pixels where there are too many to hold patches."""
        return self.pixels if many(self.stored.shape[1]) else self.patches

    def rows(self, target: Target) -> slice:
        return slice(self.n_support) if target == "support" else slice(self.n_support, None)


class Noise(NamedTuple):
    """Standard normal noise for the latents of the target images; zeros give the latents' means."""

    semantic: Tensor  # (task, image, semantic_latents)
    label: Tensor  # (task, image, label_latents)


class Encodings(NamedTuple):
    """What the encoders make of all images of a task."""

    label: Tensor  # (task, n_images, h, w, channel)
    semantic: Tensor | None  # the same; None where it matters which images are encoded together


class Latents(NamedTuple):
    """Inferred of the target images and, before them, of `n_context` support images that come along."""

    semantic: Gaussian
    label: Gaussian
    z_semantic: Tensor  # (task, n_context + image, semantic_latents)
    z_label: Tensor  # (task, n_context + image, label_latents)
    n_context: int
    context_labels: Tensor | None = None  # (task, n_context)

    @property
    def codes(self) -> Tensor:
        """What the decoder reads: (task, n_context + image, semantic_latents + label_latents)."""
        return torch.cat([self.z_semantic, self.z_label], 2)


class Output(NamedTuple):
    """What the network says of the target images."""

    logits: Tensor  # (task, image, n_way)
    label: Gaussian
    semantic: Gaussian
    reconstruction: Tensor | None  # (task, image, height, width, channel); None where it is scored elsewhere
    training_class_logits: Tensor | None = None  # (task, image, training class), where there is a head for them


@dataclass(frozen=True)
class Trident:
    """The network's structure. It holds no weights: they are passed to every call, one set for each task."""

    settings: ModelSettings
    episode: EpisodeSpec
    refinements: int = 0  # rounds in which the queries share in the prototypes

    @property
    def semantic_encoder(self) -> Conv4:
        return self._encoder("semantic_encoder", self.settings.channels)

    @property
    def label_encoder(self) -> Conv4:
        return self._encoder("label_encoder", self.settings.label_encoder_channels)

    def _encoder(self, name: str, channels: int) -> Conv4:
        s = self.settings
        return Conv4(name, s.image_channels, channels, s.activation, s.block_order)

    @property
    def semantic_head(self) -> GaussianHead:
        s = self.settings
        inputs = self.semantic_encoder.n_features(s.image_size)
        return GaussianHead("semantic", inputs, s.semantic_latents, s.initial_log_var, s.log_var_bound)

    @property
    def label_head(self) -> GaussianHead:
        s = self.settings
        inputs = self.label_encoder.n_features(s.image_size) + s.semantic_latents
        return GaussianHead("label", inputs, s.label_latents, s.initial_log_var, s.log_var_bound)

    @property
    def attfex(self) -> Attfex | None:
        s = self.settings
        if s.attfex == "off":
            return None
        return Attfex(
            "attfex",
            self._extractor,
            s.attfex_width_m,
            s.attfex_width_n,
            s.activation,
            s.attention_activation,
            s.attention_scale,
            s.attfex_residual,
        )

    @property
    def _extractor(self) -> Extractor:
        s = self.settings
        if s.attfex == "positional":
            return Positional("attfex", self.episode.n_images, s.attfex_width_m)
        if s.attfex_pooling == "seeds":
            return Seeds("attfex", s.label_encoder_channels, s.attfex_width_m)
        return (Moments if s.attfex_pooling == "moments" else Classes)("attfex", s.attfex_width_m)

    @property
    def classifier(self) -> tuple[Linear, Linear]:
        s = self.settings
        return (
            Linear("classifier.0", s.label_latents, s.classifier_width),
            Linear("classifier.1", s.classifier_width, self.episode.n_way),
        )

    @property
    def training_class_head(self) -> Linear | None:
        s = self.settings
        return Linear("training_classes", s.classifier_width, s.training_classes) if s.training_classes else None

    @property
    def decoder(self) -> Decoder:
        s = self.settings
        latents = s.label_latents + s.semantic_latents
        return Decoder(
            "decoder", latents, s.image_size, s.image_channels, s.channels, s.activation, s.decoder_batch_norm
        )

    def initial(self, seed: int) -> Parameters:
        """Random weights, without a task axis."""
        generator = torch.Generator().manual_seed(seed)
        start = self.semantic_encoder.initial(generator) | self.semantic_head.initial(generator)
        start |= self.label_encoder.initial(generator) | self.label_head.initial(generator)
        if self.attfex is not None:
            start |= self.attfex.initial(generator)
        for layer in self.classifier:
            start |= layer.initial(generator)
        if self.training_class_head is not None:
            start |= self.training_class_head.initial(generator)
        start |= self.decoder.initial(generator)
        if self.settings.classifier_start == "prototypes":
            del start["classifier.1.weight"], start["classifier.1.bias"]  # `prototype_classifier` makes them
            start[self._scale] = torch.tensor(UNIT_SCALE if self._unit else PROTOTYPE_SCALE)
        return start

    def initial_running(self) -> Parameters:
        """Batch-norm statistics before any have been gathered."""
        layers: list[ConvLayer] = [*self.semantic_encoder.layers, *self.label_encoder.layers, *self.decoder.layers]
        return {key: value for layer in layers for key, value in layer.initial_running().items()}

    def __call__(
        self,
        parameters: Parameters,
        images: TaskImages,
        target: Target,
        noise: Noise,
        statistics: BatchNormStatistics,
    ) -> Output:
        """Infer the latents of the target set, classify it and reconstruct it."""
        return self.generate(parameters, self.infer(parameters, images, target, noise, statistics), statistics)

    def generate(self, parameters: Parameters, latents: Latents, statistics: BatchNormStatistics) -> Output:
        """p(y | z_label) and p(x | z_label, z_semantic) of the target images."""
        first = latents.n_context
        if statistics.source == "support":
            reconstruction = self.decoder(parameters, latents.codes, statistics)[:, first:]
        else:
            reconstruction = self.decoder(parameters, latents.codes[:, first:], statistics)
        return Output(
            self.classify(parameters, latents),
            Gaussian(*(x[:, first:] for x in latents.label)),
            Gaussian(*(x[:, first:] for x in latents.semantic)),
            reconstruction,
            self.training_class_logits(parameters, latents),
        )

    def classify(self, parameters: Parameters, latents: Latents) -> Tensor:
        """Logits of the target images: (task, image, n_way)."""
        features = self._compared_features(parameters, latents.z_label)
        logits: Tensor = self.classifier[1](parameters, features)[:, latents.n_context :]
        if latents.context_labels is None:
            return logits
        support = members_of(latents.context_labels, self.episode.n_way, features)
        for _ in range(self.refinements):
            # Each query belongs to every class in part, by the probability it was given before.
            queries = torch.softmax(logits, -1).transpose(1, 2)  # (task, n_way, query)
            prototypes = class_means(torch.cat([support, queries], 2), features)
            last = self._last_layer(parameters, prototypes)
            logits = self.classifier[1](parameters | last, features[:, latents.n_context :])
        return logits

    def training_class_logits(self, parameters: Parameters, latents: Latents) -> Tensor | None:
        if self.training_class_head is None:
            return None
        features = self._classifier_features(parameters, latents.z_label[:, latents.n_context :])
        return self.training_class_head(parameters, features)

    def has_context(self, target: Target, batch_norm: str) -> bool:
        """Whether the support set comes along with the queries, at its latents' means.

        It does to give its statistics to batch norm, or to have the prototypes refined.
        """
        return target == "query" and (batch_norm == "support" or self.refinements > 0)

    def infer(
        self,
        parameters: Parameters,
        images: TaskImages,
        target: Target,
        noise: Noise,
        statistics: BatchNormStatistics,
        encodings: Encodings | None = None,
    ) -> Latents:
        """Encode the images, if they are not yet, then infer their latents: lines 1 to 3 of Algorithm 1."""
        context = self.has_context(target, statistics.source)
        rows = slice(None) if context else images.rows(target)
        if encodings is None:
            encodings = Encodings(self.label_encoder(parameters, images.for_encoders, statistics), None)
        if encodings.semantic is None:
            semantic_features = self.semantic_encoder(parameters, images.for_encoders[:, rows], statistics)
        else:
            semantic_features = encodings.semantic[:, rows]
        return self.posteriors(parameters, semantic_features, encodings.label, images, target, noise, context)

    def encode(self, parameters: Parameters, images: TaskImages, statistics: BatchNormStatistics) -> Encodings:
        """For several calls of `infer` with the same parameters: what they would all compute."""
        label = self.label_encoder(parameters, images.for_encoders, statistics)
        if statistics.source != "running":
            return Encodings(label, None)
        return Encodings(label, self.semantic_encoder(parameters, images.for_encoders, statistics))

    def posteriors(
        self,
        parameters: Parameters,
        semantic_features: Tensor,  # (task, image, h, w, channel)
        features: Tensor,  # (task, n_images, h, w, channel), the label encoder's, of all images
        images: TaskImages,
        target: Target,
        noise: Noise,
        context: bool,
    ) -> Latents:
        """q(z_semantic | x), then q(z_label | x, z_semantic), from what the encoders made of x.

        With `context`, the semantic features are those of all images.
        """
        rows, n_context = (slice(None), images.n_support) if context else (images.rows(target), 0)
        if context:
            noise = Noise(*(torch.cat([x.new_zeros(len(x), n_context, x.shape[2]), x], 1) for x in noise))
        semantic = self.semantic_head(parameters, semantic_features.flatten(2))
        z_semantic = semantic.sample(noise.semantic)
        target_features = features[:, rows]
        if self.attfex is not None:
            of_task = TaskFeatures(features, images.support_labels, self.episode.n_way)
            target_features = target_features * self.attfex(parameters, of_task)
        label = self.label_head(parameters, torch.cat([target_features.flatten(2), z_semantic], 2))
        labels = images.support_labels if context else None
        return Latents(semantic, label, z_semantic, label.sample(noise.label), n_context, labels)

    def prototype_classifier(self, parameters: Parameters, support: Latents, labels: Tensor) -> Parameters:
        """A last layer whose logits are scaled negative squared distances to the support classes' mean features."""
        features = self._compared_features(parameters, support.z_label)  # (task, n_support, classifier_width)
        members = members_of(labels, self.episode.n_way, features)
        return self._last_layer(parameters, class_means(members, features))

    def _last_layer(self, parameters: Parameters, prototypes: Tensor) -> Parameters:
        """Prototypes (task, n_way, classifier_width) as weight and bias."""
        scale = parameters[self._scale]  # (task,)
        return {
            "classifier.1.weight": 2 * scale[:, None, None] * prototypes,
            "classifier.1.bias": -scale[:, None] * prototypes.square().sum(2),
        }

    @property
    def _unit(self) -> bool:
        return self.settings.classifier_features == "unit"

    @property
    def _scale(self) -> str:
        """Two names, because a scale learned for one kind of features means nothing for the other."""
        return "classifier.unit_scale" if self._unit else "classifier.scale"

    def _compared_features(self, parameters: Parameters, z_label: Tensor) -> Tensor:
        """What distances to prototypes are measured between."""
        features = self._classifier_features(parameters, z_label)
        return F.normalize(features, dim=2) if self._unit else features

    def _classifier_features(self, parameters: Parameters, z_label: Tensor) -> Tensor:
        return activate(self.classifier[0](parameters, z_label), self.settings.activation)
