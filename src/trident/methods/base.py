"""The interface of a few-shot method. Read this file first, then `protonet.py`, which is a complete method.

A method is a frozen dataclass. Its fields are its settings: the keys of a recipe's [method] table. `about` describes
it. Most methods are a head on features: they subclass `HeadOnFeatures` and write one function, `head`. Methods that
adapt their weights to each task subclass `InnerLoopMethod` (`inner_loop.py`).

A method gets a `Task`, which has no query labels. Only its training loss gets those. What most methods need can be
imported from here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.backbones.base import Backbone as Backbone
from trident.backbones.conv4 import Conv4Backbone, single_conv4
from trident.errors import TridentError
from trident.methods.registry import About as About
from trident.nn.batch_norm import BatchNormStatistics, WithStatistics
from trident.nn.linear import Linear, linear
from trident.nn.parameters import Parameters as Parameters
from trident.nn.parameters import for_each_task
from trident.settings import EpisodeSpec as EpisodeSpec
from trident.settings import check_bounds
from trident.settings import setting as setting
from trident.tasks.source import NoiseShapes as NoiseShapes
from trident.tasks.task import Batch
from trident.tasks.task import Labels as Labels
from trident.tasks.task import Task as Task

tunable = partial(setting, after_training=True)  # a setting that may be changed for trained weights
Losses = dict[str, Tensor]  # the parts by name, (task,) each; "total" is what training minimises


class Model(ABC):
    """A method on a backbone, for tasks of one shape. It knows its parameters' shapes, but holds no values."""

    method: "Method"
    backbone: Backbone

    @abstractmethod
    def initial(self, generator: torch.Generator) -> Parameters:
        """Random parameters, including the backbone's."""

    @abstractmethod
    def initial_running(self) -> Parameters:
        """Running statistics before any have been gathered in training."""

    def noise_shapes(self, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        """The noise that a task needs. For queries, once for each prediction that is averaged."""
        return {}


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods."""

    about: ClassVar[About]

    def __post_init__(self) -> None:
        check_bounds(self, "method")

    @abstractmethod
    def model(self, backbone: Backbone, episode: EpisodeSpec) -> Model:
        """The method on a backbone, for tasks of this shape."""

    @property
    def any_way(self) -> bool:
        """Whether trained weights can classify tasks with any number of classes. It may depend on a setting."""
        return self.about.any_way

    @property
    def any_queries(self) -> bool:
        """Whether trained weights can classify any number of queries at once."""
        return True

    @property
    def classifies_together(self) -> bool:
        """Whether a query can change the prediction for another, apart from batch norm. It may depend on a setting."""
        return self.about.transductive

    @property
    def positional(self) -> bool:
        """Whether weights are tied to positions in the task, so that the order of the images matters."""
        return self.about.positional

    @property
    def inner_steps(self) -> int:
        """Number of gradient steps that adapt the weights to each task."""
        return 0

    @property
    def n_training_classes(self) -> int:
        """Number of training classes, if training needs to know it: the setting of this name; otherwise 0."""
        return int(getattr(self, "training_classes", 0))

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to the parameter of this name."""
        return True

    def batch_noise(self) -> NoiseShapes:
        """The noise that a training batch of single images needs, for methods trained on all classes."""
        return {}

    def in_training(self) -> "Method":
        """The method with its settings for training, if they differ."""
        return self

    def for_few_queries(self) -> "Method":
        """The method for tasks with too few queries to learn from."""
        return self

    def describe(self) -> str:
        """How it predicts, in words, as part of a result's protocol; empty if no setting changes that."""
        return ""

    def check_episode(self, trained: EpisodeSpec, episode: EpisodeSpec) -> None:
        """Raise an error if weights trained on one shape of task cannot take another."""
        if episode.n_way != trained.n_way and not self.any_way:
            raise TridentError(f"these weights classify {trained.n_way} ways, not {episode.n_way}")
        if episode.n_queries != trained.n_queries and not self.any_queries:
            raise TridentError(
                f"these weights take {trained.n_queries} queries in a task ({trained.describe_queries()}), not "
                f"{episode.n_queries} ({episode.describe_queries()})"
            )
        if self.positional and episode != trained:
            raise TridentError(
                f"these weights are tied to positions in {trained.describe()} tasks with {trained.describe_queries()}: "
                f"they cannot take {episode.describe()} tasks with {episode.describe_queries()}"
            )

    def check_training(self, backbone: Backbone) -> None:  # noqa: B027 - most methods can be trained with any
        """Raise an error if it cannot be trained with this backbone."""


class TrainingStep(NamedTuple):
    """What a training batch gives before the gradient is computed."""

    losses: Losses  # (task,) each
    logits: Tensor  # (task, image, class): the share that is right is logged
    truth: Tensor  # (task, image) int64
    statistics: Parameters  # of batch norm, and the method's own: (task, ...) each


@dataclass(frozen=True)
class HeadOnFeatures(Method):
    """Base of methods that classify features. They work with any backbone and engine."""

    takes_cells: ClassVar[bool] = False  # whether features come as (task, image, cell, channel): one cell of the
    # backbone's square feature map after another, row by row. A backbone without maps has one cell.

    @abstractmethod
    def head(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """Features of all images (task, image, feature), the support set first -> query logits (task, query, n_way).

        Parameters have no task axis here: use `linear`, not the layers of `nn/`.
        """

    def image_features(self, parameters: Parameters, features: Tensor) -> Tensor:
        """The features that `head` takes: the backbone's, or the output of the method's own layers for each image.

        `views.average` averages them over the views of an image. A method that overrides `training` or
        `training_logits` gets the backbone's features there, and has to apply these layers itself.
        """
        return features

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        """The head's own parameters. `n_features`: of an image, or of one of its cells with `takes_cells`."""
        return {}

    def initial_on(self, model: "HeadModel", generator: torch.Generator) -> Parameters:
        """All parameters, the backbone's too. For heads whose own depend on the feature map or the shape of tasks."""
        return model.backbone.initial(generator) | self.initial(model.n_features, generator)

    def initial_statistics(self, n_features: int) -> Parameters:
        """Statistics of the training features that `head` finds among its parameters, before any training."""
        return {}

    def statistics(self, features: Tensor) -> Parameters:
        """The statistics of one batch, (task, image, feature) -> (task, ...). Training keeps their running means."""
        return {}

    def labelled_statistics(self, features: Tensor, labels: Labels) -> Parameters:
        """The statistics of a training batch whose labels are known. Override it for statistics of single classes."""
        return self.statistics(features)

    def training_logits(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        """The logits for the loss: by default the same as in prediction."""
        return self.head(parameters, self.image_features(parameters, features), task)

    def losses(self, logits: Tensor, labels: Labels) -> Losses:
        """The loss of each task, (task,), by name. All names are logged and plotted; "total" is minimised."""
        return {"total": cross_entropy(logits, labels.queries)}

    def training(self, parameters: Parameters, features: Tensor, task: Task, labels: Labels) -> tuple[Tensor, Losses]:
        """Logits and losses in training. Override it for a loss that needs more than the logits."""
        logits = self.training_logits(parameters, features, task)
        return logits, self.losses(logits, labels)

    def training_step(
        self, model: "HeadModel", parameters: Parameters, batch: Batch, statistics: BatchNormStatistics
    ) -> TrainingStep:
        """The losses of a batch. Override it for training that reaches into the backbone, which only `plain` can do."""
        task, labels = batch
        features, seen = model.encode(parameters, task, statistics)
        logits, losses = self.training(model.with_batch_statistics(parameters, features), features, task, labels)
        return TrainingStep(losses, logits, labels.queries, seen | self.labelled_statistics(features.detach(), labels))

    def noise_on(self, model: "HeadModel", episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        """The noise that a task needs, as in `Model.noise_shapes`; `task.noise` then has it."""
        return {}

    def model(self, backbone: Backbone, episode: EpisodeSpec) -> "HeadModel":
        if self.takes_cells and isinstance(backbone, Conv4Backbone):
            single_conv4(backbone, self.about.title)  # the joined maps of several networks are not square
        return HeadModel(self, backbone, episode)


@dataclass(frozen=True)
class ClassifierHead(HeadOnFeatures):
    """Base of heads whose features are trained by a linear classifier of all training classes."""

    training_classes: int = setting(64, "number of classes in the training split", most=100_000, least=2)

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        return Linear("classes", n_features, self.training_classes).initial(generator)

    def training_logits(self, parameters: Parameters, features: Tensor, task: Task) -> Tensor:
        return linear(parameters, "classes", features)


@dataclass(frozen=True)
class HeadModel(Model):
    """A head on a backbone's features."""

    method: HeadOnFeatures
    backbone: Backbone
    episode: EpisodeSpec

    def initial(self, generator: torch.Generator) -> Parameters:
        return self.method.initial_on(self, generator)

    def initial_running(self) -> Parameters:
        return self.backbone.initial_running() | self.method.initial_statistics(self.n_features)

    @property
    def n_features(self) -> int:
        """Number of features that the head gets: of a whole image, or of one cell with `takes_cells`."""
        return self.backbone.n_features // (self.backbone.n_cells if self.method.takes_cells else 1)

    def encode(self, parameters: Parameters, task: Task, statistics: BatchNormStatistics) -> WithStatistics:
        """Features of all images, as the head takes them, and the batch-norm statistics."""
        maps, seen = self.backbone(for_each_task(parameters, task.n_tasks), task, statistics)
        return self.features(maps), seen

    def features(self, maps: Tensor) -> Tensor:
        """The backbone's output (task, image, ...) in the shape that the head takes."""
        if not self.method.takes_cells:
            return maps.flatten(2)
        return maps.flatten(2, -2) if maps.dim() > 3 else maps[:, :, None]

    def noise_shapes(self, episode: EpisodeSpec, predictions: int) -> NoiseShapes:
        return self.method.noise_on(self, episode, predictions)

    def with_running_statistics(self, parameters: Parameters, running: Parameters | None) -> Parameters:
        """The parameters, with the running statistics that the head needs, for predictions."""
        needed = self.method.initial_statistics(self.n_features)
        return parameters | {key: value for key, value in (running or {}).items() if key in needed}

    def with_batch_statistics(self, parameters: Parameters, features: Tensor) -> Parameters:
        """The parameters, with the same statistics of this batch, for training."""
        statistics = self.method.statistics(features.detach())  # (task, ...) each
        return parameters | {key: value.mean(0) for key, value in statistics.items()}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over images: (task, image, class) and (task, image) -> (task,)."""
    return F.nll_loss(torch.log_softmax(logits, -1).transpose(1, 2), labels, reduction="none").mean(1)


MEAN = "mean_feature"  # of all training images


@dataclass(frozen=True)
class NormalisedHead(HeadOnFeatures):
    """Base of heads that call `normalised` on their features first.

        UN     f(x)
        L2N    f(x) / ||f(x)||
        CL2N   (f(x) - m) / ||f(x) - m||,   m = mean of the training features

    Trained weights bring m. Methods that are not trained take it from the training classes of the store that they are
    measured on. Where there are none, as for the pictures of a user, m is 0.
    """

    normalisation: Literal["UN", "L2N", "CL2N"] = tunable(
        "CL2N", "normalisation of features: none, unit length, or centred on the training images and unit length"
    )

    def initial_statistics(self, n_features: int) -> Parameters:
        return {MEAN: torch.zeros(n_features)}

    def statistics(self, features: Tensor) -> Parameters:
        return {MEAN: features.mean(1)}

    def normalised(self, parameters: Parameters, features: Tensor) -> Tensor:
        if self.normalisation == "CL2N" and MEAN in parameters:
            features = features - parameters[MEAN]
        return features if self.normalisation == "UN" else F.normalize(features, dim=2)
