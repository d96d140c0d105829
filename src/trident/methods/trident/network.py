"""TRIDENT's network (Algorithm 1 of the paper): images -> latents -> logits and reconstructions.

The generative story of an image x with label y:

    z_semantic ~ p(z_semantic)      what the image looks like: style, context
    z_label    ~ p(z_label)         what class it belongs to
    y ~ p(y | z_label)              the classifier
    x ~ p(x | z_label, z_semantic)  the decoder

Inference runs the other way with two intertwined networks: q(z_semantic | x), then q(z_label | x, z_semantic), where
AttFEX makes the second one aware of all images of the task.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone, first_layer_input, single_conv4
from trident.methods.base import About, Backbone, EpisodeSpec, Labels, NoiseShapes, Parameters, Task
from trident.methods.inner_loop.base import Encodings, Evaluated, InnerLoopModel, Inputs, Target
from trident.methods.trident.objective import Inferred, Latents, negative_evidence_lower_bound
from trident.methods.trident.settings import TridentSettings
from trident.nn.attfex import Attfex, TaskFeatures
from trident.nn.batch_norm import BatchNormStatistics, WithStatistics
from trident.nn.classes import members_of, weighted_means
from trident.nn.conv4 import Conv4, Decoder
from trident.nn.gaussian import GaussianHead
from trident.nn.linear import Linear, activate

PROTOTYPE_SCALE = 0.1  # start of the learned scale of distances to prototypes
UNIT_SCALE = 7.0  # the same, between features of unit length


@dataclass(frozen=True)
class Network(InnerLoopModel):
    """It holds no weights: they are passed to every call. A part's name begins the names of its parameters."""

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

    # Inference: lines 1 to 3 of Algorithm 1.

    def encode(self, parameters: Parameters, inputs: Inputs) -> Encodings:
        label, _ = self.backbone(parameters, inputs.task, inputs.statistics)
        semantic, _ = self.encode_semantic(parameters, inputs.task, inputs.statistics, slice(None))
        return {"label": label, "semantic": semantic}

    def encode_semantic(
        self, parameters: Parameters, task: Task, statistics: BatchNormStatistics, rows: slice
    ) -> WithStatistics:
        """The semantic encoder's features (task, image, h, w, channel) of some images, and the batch-norm statistics.

        `method.semantic_batch_norm` says which images are normalised together; it does not depend on `rows`.
        """
        images = first_layer_input(task)
        if statistics.source == "support" or (statistics.source == "transductive" and self.whole_task):
            features, seen = self.semantic_encoder(parameters, images, statistics)
            return features[:, rows], seen
        if statistics.source == "running" or rows != slice(None) or 0 in (task.n_support, task.n_queries):
            return self.semantic_encoder(parameters, images[:, rows], statistics)
        support, _ = self.semantic_encoder(parameters, images[:, task.support], statistics)
        queries, seen = self.semantic_encoder(parameters, images[:, task.queries], statistics)
        return torch.cat([support, queries], 1), seen

    @property
    def whole_task(self) -> bool:
        return self.method.semantic_batch_norm == "task"

    def has_context(self, target: Target, statistics: BatchNormStatistics) -> bool:
        """Whether support images are inferred too, with latent means: for refinements, or for support statistics."""
        return target == "query" and (self.method.refinements > 0 or statistics.source == "support")

    def infer(self, parameters: Parameters, inputs: Inputs) -> tuple[Latents, Parameters]:
        """Latents of one set, and the encoders' batch-norm statistics."""
        task, statistics = inputs.task, inputs.statistics
        context = self.has_context(inputs.target, statistics)
        rows = slice(None) if context else inputs.rows
        if inputs.encodings is not None:
            features, seen = (inputs.encodings["semantic"][:, rows], inputs.encodings["label"]), Parameters()
        else:
            label, seen = self.backbone(parameters, task, statistics)
            semantic, more = self.encode_semantic(parameters, task, statistics, rows)
            features, seen = (semantic, label), seen | more
        return self.posteriors(parameters, *features, task, inputs.target, inputs.draw, context), seen

    def posteriors(
        self,
        parameters: Parameters,
        semantic_features: Tensor,  # (task, image, h, w, channel)
        label_features: Tensor,  # (task, n_images, h, w, channel), of all images
        task: Task,
        target: Target,
        draw: int | str,
        context: bool,
    ) -> Latents:
        """q(z_semantic | x), then q(z_label | x, z_semantic). With `context`, semantic features are of all images."""
        own = task.support if target == "support" else task.queries
        rows, n_context = (slice(None), task.n_support) if context else (own, 0)

        def noise(latent: str) -> Tensor:
            values = task.noise[f"{target}/{draw}/{latent}"]
            return F.pad(values, (0, 0, n_context, 0)) if context else values

        semantic = self.semantic_head(parameters, semantic_features.flatten(2))
        z_semantic = semantic.sample(noise("semantic"))
        target_features = label_features[:, rows]
        if self.attfex is not None:
            of_task = TaskFeatures(label_features, task.support_labels, task.n_way)
            target_features = target_features * self.attfex(parameters, of_task)
        evidence = [target_features.flatten(2), *([z_semantic] if self.method.label_reads_semantic else [])]
        label = self.label_head(parameters, torch.cat(evidence, 2))
        return Latents(semantic, label, z_semantic, label.sample(noise("label")), n_context)

    # Classification and reconstruction.

    def logits(self, parameters: Parameters, inputs: Inputs) -> list[Tensor]:
        draws = range(self.n_draws(inputs.task))
        inferred = [self.infer(parameters, inputs._replace(draw=draw))[0] for draw in draws]
        return [self.classify(parameters, latents, inputs.task) for latents in inferred]

    def classify(self, parameters: Parameters, latents: Latents, task: Task) -> Tensor:
        """Logits of the target images: (task, image, n_way)."""
        features = self._compared_features(parameters, latents.z_label)
        logits: Tensor = self.classifier[1](parameters, features)[:, latents.n_context :]
        if latents.n_context == 0:
            return logits
        support = members_of(task.support_labels, task.n_way, features)
        for _ in range(self.method.refinements):
            # Each query belongs to every class in part, by the probability it was given before.
            queries = torch.softmax(logits, -1).transpose(1, 2)  # (task, n_way, query)
            prototypes = weighted_means(torch.cat([support, queries], 2), features)
            last = self._last_layer(parameters, prototypes)
            logits = self.classifier[1](parameters | last, features[:, latents.n_context :])
        return logits

    def decode(self, parameters: Parameters, latents: Latents, statistics: BatchNormStatistics) -> WithStatistics:
        """Images decoded from the latents of the target images, and the decoder's batch-norm statistics."""
        first = latents.n_context
        if statistics.source == "support":
            images, seen = self.decoder(parameters, self.codes(latents), statistics)
            return images[:, first:], seen
        return self.decoder(parameters, self.codes(latents)[:, first:], statistics)

    def codes(self, latents: Latents) -> Tensor:
        """What the decoder reads: (task, n_context + image, semantic_latents + label_latents)."""
        z_label = latents.z_label if self.method.label_learns_to_reconstruct else latents.z_label.detach()
        return torch.cat([latents.z_semantic, z_label], 2)

    # The loss.

    def loss(self, parameters: Parameters, inputs: Inputs) -> Evaluated:
        """Can reuse what `start` returned: latents of the support set from the same parameters and noise."""
        latents, seen = inputs.reused or self.infer(parameters, inputs)
        squared_error, more = self._squared_error(parameters, latents, inputs)
        inferred = self.inferred(parameters, latents, inputs.task, squared_error, inputs.labels)
        losses = negative_evidence_lower_bound(inferred, self.method)
        if inputs.target == "support" and self.method.unlabelled_weight:
            losses["total"] = losses["total"] + self.unlabelled_loss(parameters, inputs)
        return Evaluated(losses, inferred.logits, seen | more)

    def _squared_error(self, parameters: Parameters, latents: Latents, inputs: Inputs) -> WithStatistics:
        """That of the decoded images, (task,), and the decoder's batch-norm statistics."""
        images, seen = self.decode(parameters, latents, inputs.statistics)
        return (images - inputs.task.pixels[:, inputs.rows]).square().sum((2, 3, 4)).mean(1), seen

    def unlabelled_loss(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        """What the images without labels add to the loss of an inner step: (task,)."""
        inputs = inputs._replace(target="query", draw=inner_draw(inputs.draw))
        latents, _ = self.infer(parameters, inputs)
        squared_error, _ = self._squared_error(parameters, latents, inputs)
        label_kl, semantic_kl = (divergence.mean(1) for divergence in self.divergences(latents))
        terms = {"reconstruction": squared_error, "label_kl": label_kl, "semantic_kl": semantic_kl}
        total = torch.stack([self.method.weight(name) * term for name, term in terms.items()]).sum(0)
        return self.method.unlabelled_weight * total

    def divergences(self, latents: Latents) -> tuple[Tensor, Tensor]:
        """KL divergences of q(z_label) and q(z_semantic) of the target images from N(0, I): (task, image) each."""
        targets = latents.targets
        return targets.label.kl_to_standard_normal(), targets.semantic.kl_to_standard_normal()

    def inferred(
        self, parameters: Parameters, latents: Latents, task: Task, squared_error: Tensor, labels: Labels | None
    ) -> Inferred:
        """All inputs of the terms of the loss. Without labels: those of the support set."""
        head, training_class_logits = self.training_class_head, None
        if head is not None:
            training_class_logits = head(parameters, self._hidden(parameters, latents.targets.z_label))
        return Inferred(
            latents,
            self.classify(parameters, latents, task),
            task.support_labels if labels is None else labels.queries,
            squared_error,
            *self.divergences(latents),
            training_class_logits,
            None if labels is None else labels.training_classes,
        )

    # Prototypes: a last layer whose logits are scaled negative squared distances to the classes' mean features.

    def start(self, parameters: Parameters, inputs: Inputs) -> tuple[Parameters, Any]:
        if self.method.classifier_start == "learned":
            return parameters, None
        latents, seen = self.infer(parameters, inputs._replace(target="support"))
        return parameters | self.prototype_classifier(parameters, latents, inputs.task), (latents, seen)

    def prototype_classifier(self, parameters: Parameters, support: Latents, task: Task) -> Parameters:
        features = self._compared_features(parameters, support.z_label)  # (task, n_support, classifier_width)
        members = members_of(task.support_labels, task.n_way, features)
        return self._last_layer(parameters, weighted_means(members, features))

    def _last_layer(self, parameters: Parameters, prototypes: Tensor) -> Parameters:
        """Prototypes (task, n_way, classifier_width) as weight and bias."""
        scale = parameters[self._scale].abs()  # (task,). Below 0, the farthest class would win.
        return {
            "classifier.1.weight": 2 * scale[:, None, None] * prototypes,
            "classifier.1.bias": -scale[:, None] * prototypes.square().sum(2),
        }

    def _compared_features(self, parameters: Parameters, z_label: Tensor) -> Tensor:
        """The features between which distances to prototypes are measured."""
        features = self._hidden(parameters, z_label)
        return F.normalize(features, dim=2) if self._unit else features

    def _hidden(self, parameters: Parameters, z_label: Tensor) -> Tensor:
        return activate(self.classifier[0](parameters, z_label), self.backbone.activation)


def inner_draw(step: int | str) -> str:
    """The name of the draw of the queries' noise for an inner step."""
    return f"step{step}"


@dataclass(frozen=True)
class Trident(TridentSettings):
    """Two intertwined variational networks split an image into its class (z_label) and its looks (z_semantic).

    Learned: two Conv4 encoders, AttFEX, a classifier and a decoder, so that a few gradient steps on the support set
    adapt all of them to a task. At test the same steps are taken, then the queries are classified from z_label. With
    refinements, the class prototypes are moved towards the queries, which makes the method transductive. With
    attfex=positional, as published, weights are tied to the positions of images in a task.
    """

    about = About(
        "TRIDENT",
        "Singh & Jamali-Rad 2022",
        "Transductive Decoupled Variational Inference for Few-Shot Classification",
        transductive=True,
        analyses=("latents", "reconstructions"),
        any_way=False,
        positional=True,
    )

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> Network:
        return Network(self, single_conv4(backbone, "TRIDENT"), episode)
