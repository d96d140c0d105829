"""Every setting there is, typed and checked. Recipes are values of `Recipe`; nothing here imports torch.

Where the paper and its released code differ, the setting's help says which value is whose.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from trident.errors import TridentError


def setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def require(condition: bool, message: str) -> None:
    if not condition:
        raise TridentError(message)


@dataclass(frozen=True)
class EpisodeSpec:
    """An N-way K-shot task with Q queries for each class."""

    n_way: int = setting(5, "classes in a task")
    n_shot: int = setting(1, "labelled images of each class")
    n_query: int = setting(10, "images to label, of each class (on average, if unbalanced)")

    def __post_init__(self) -> None:
        for name in ("n_way", "n_shot", "n_query"):
            if getattr(self, name) < 1:
                raise TridentError(f"episode.{name} is {getattr(self, name)}: at least 1 is needed")

    def describe(self) -> str:
        return f"{self.n_way}-way {self.n_shot}-shot"

    @property
    def n_support(self) -> int:
        return self.n_way * self.n_shot

    @property
    def n_queries(self) -> int:
        return self.n_way * self.n_query

    @property
    def n_images(self) -> int:
        return self.n_support + self.n_queries


@dataclass(frozen=True)
class Protocol:
    """How a number was obtained. Every accuracy carries one of these."""

    query_order: Literal["shuffled", "class_sorted"] = setting(
        "shuffled", "class_sorted shows a positional AttFEX the classes of the queries: see the README"
    )
    balance: Literal["balanced", "dirichlet"] = setting(
        "balanced", "exactly n_query queries of each class, or Dirichlet-distributed counts"
    )
    queries_at_once: Literal["all", "one"] = setting(
        "all", "one: each query is a task of its own, so that no query can lean on the others"
    )
    dirichlet_alpha: float = setting(2.0, "concentration of the Dirichlet distribution")
    batch_norm: Literal["transductive", "support", "running"] = setting(
        "transductive", "statistics of the images at hand (as the paper), of the support set, or of training"
    )
    latents: Literal["sample", "mean", "average"] = setting(
        "mean", "latents at test: one sample, the mean, or the average of many predictions"
    )
    latent_samples: int = setting(10, "samples behind latents=average")

    def __post_init__(self) -> None:
        if not 0 < self.dirichlet_alpha < 1e6:
            raise TridentError(f"protocol.dirichlet_alpha is {self.dirichlet_alpha}: it must be above 0, below 1e6")
        if self.latent_samples < 1:
            raise TridentError(f"protocol.latent_samples is {self.latent_samples}: at least 1 is needed")

    def describe(self) -> str:
        order = f"{self.query_order.replace('_', '-')} queries"
        balance = "balanced" if self.balance == "balanced" else f"Dirichlet({self.dirichlet_alpha:g}) class counts"
        latents = {"sample": "one latent sample", "mean": "latent means"}.get(
            self.latents, f"average of {self.latent_samples} latent samples"
        )
        alone = "one query at a time, " if self.queries_at_once == "one" else ""
        return f"{order}, {alone}{balance}, {self.batch_norm} batch norm, {latents}"


@dataclass(frozen=True)
class ModelSettings:
    """The architecture. It depends on these values alone, never on a dataset's name."""

    method: Literal["trident", "protonet"] = setting(
        "trident", "TRIDENT, or a Prototypical Network on the same Conv4, for which only the Conv4's settings count"
    )
    image_size: int = setting(84, "height and width of the images in pixels")
    image_channels: int = setting(3, "3 for colour, 1 for grey")
    channels: int = setting(32, "feature maps in each block of the Conv4 encoders and of the decoder")
    label_channels: int | None = setting(None, "the label encoder's own number of them; 'none' takes model.channels")
    label_latents: int = setting(64, "size of z_label")
    semantic_latents: int = setting(64, "size of z_semantic")
    classifier_width: int = setting(32, "hidden units between z_label and the logits")
    classifier_start: Literal["learned", "prototypes"] = setting(
        "learned", "last layer before adaptation: learned (paper), or the support classes' mean features, for any n_way"
    )
    classifier_features: Literal["plain", "unit"] = setting(
        "plain", "distances to prototypes are between features as they are, or between features of length 1"
    )
    training_classes: int = setting(
        0, "classes of a second head, an aid in training alone, that tells all training classes apart; 0 for none"
    )
    attfex: Literal["positional", "set", "off"] = setting(
        "positional", "the paper's AttFEX with one weight for each image position; one that knows no places; or none"
    )
    attfex_pooling: Literal["seeds", "moments", "classes"] = setting(
        "seeds", "how attfex=set gathers a task's images: by learned attention, by moments, or by support classes"
    )
    attfex_residual: bool = setting(False, "multiply features by 1 + G instead of G (the paper)")
    attfex_width_m: int = setting(64, "features extracted by W_M across the images of a task")
    attfex_width_n: int = setting(32, "features extracted by W_N")
    activation: Literal["leaky_relu", "relu"] = setting("leaky_relu", "LeakyReLU(0.2) or ReLU, in every block")
    attention_activation: bool = setting(False, "activation after the query, key and value maps (5-shot: yes)")
    attention_scale: Literal["inside", "outside"] = setting(
        "inside", "1/sqrt(W'H') inside the softmax (released code) or outside (paper's equation)"
    )
    block_order: Literal["activation_pool", "pool_activation"] = setting(
        "activation_pool", "released code's or paper's order in a Conv4 block; both give the same numbers"
    )
    decoder_batch_norm: bool = setting(False, "batch norm in the decoder (mini 5-shot and tiered 1-shot: yes)")
    initial_log_var: float | None = setting(
        None, "start of the log-variance heads' bias; 'none' keeps the layer's random start, a variance near 1"
    )
    log_var_bound: float | None = setting(None, "squash log-variances smoothly into (-bound, bound); 'none' does not")

    @property
    def label_encoder_channels(self) -> int:
        return self.label_channels or self.channels

    @property
    def positional(self) -> bool:
        """Whether there are weights tied to places in the task."""
        return self.method == "trident" and self.attfex == "positional"

    def __post_init__(self) -> None:
        for name in ("channels", "label_latents", "semantic_latents", "classifier_width"):
            require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}: at least 1 is needed")
        require(
            self.label_channels is None or self.label_channels >= 1,
            f"model.label_channels is {self.label_channels}: at least 1 is needed, or 'none'",
        )
        require(self.training_classes >= 0, f"model.training_classes is {self.training_classes}: 0 or more is needed")
        for name in ("attfex_width_m", "attfex_width_n"):
            require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}: at least 1 is needed")
        require(
            self.classifier_features == "plain" or self.classifier_start == "prototypes",
            "model.classifier_features=unit needs model.classifier_start=prototypes: there are no distances otherwise",
        )
        require(self.image_size >= 16, f"model.image_size is {self.image_size}: four poolings need at least 16 pixels")
        require(self.image_channels in (1, 3), f"model.image_channels is {self.image_channels}: it must be 1 or 3")
        require(
            self.initial_log_var is None or math.isfinite(self.initial_log_var),
            f"model.initial_log_var is {self.initial_log_var}: it must be finite, or 'none'",
        )
        require(
            self.log_var_bound is None or 0 < self.log_var_bound < math.inf,
            f"model.log_var_bound is {self.log_var_bound}: it must be above 0, or 'none'",
        )


@dataclass(frozen=True)
class ObjectiveSettings:
    """Weights of the evidence lower bound's parts; each part is a mean over the images of a set."""

    classification_weight: float = setting(100.0, "the paper's alpha_2, on the cross-entropy")
    reconstruction_weight: float = setting(0.01, "the paper's alpha_1, on the summed squared error of an image")
    label_kl_weight: float = setting(1.0, "on KL(q(z_label) || N(0, I))")
    semantic_kl_weight: float = setting(1.0, "on KL(q(z_semantic) || N(0, I))")
    training_classes_weight: float = setting(
        100.0, "on the cross-entropy of the head for all training classes, where model.training_classes has one"
    )

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            require(value >= 0 and math.isfinite(value), f"objective.{entry.name} is {value}: 0 or more is needed")


class Views(NamedTuple):
    """What a prediction is made from besides the images as they are; `views.py` shows it."""

    mirrored: bool = False
    corners: bool = False


@dataclass(frozen=True)
class AdaptationSettings:
    """The inner loop: how parameters adapt to a task's support set."""

    optimizer: Literal["sgd", "adam"] = setting("sgd", "plain gradient step (Algorithm 2, released code) or Adam")
    rate: float = setting(1e-3, "the paper's alpha")
    steps: int = setting(5, "the paper's n")
    order: Literal["second", "first"] = setting("second", "differentiate through the inner steps, or not (cheaper)")
    refinements: int = setting(
        0, "rounds, after the inner steps, in which the queries share in the prototypes by what they are taken for"
    )
    mirrored: bool = setting(
        False, "predict from the images and from their mirror images, and take the mean probability (not in training)"
    )
    corners: bool = setting(
        False, "the same with the four corners of the images, 6/7 wide; where mirrored, two of them in a mirror"
    )

    def describe(self) -> str:
        steps = f"{self.steps or 'no'} inner step{'' if self.steps == 1 else 's'}"
        rounds = f", {self.refinements} refinement{'' if self.refinements == 1 else 's'}" if self.refinements else ""
        more = " and ".join(name for name, used in zip(("mirror images", "corners"), self.views, strict=True) if used)
        return steps + rounds + (f", {more} too" if more else "")

    @property
    def views(self) -> Views:
        return Views(self.mirrored, self.corners)

    def __post_init__(self) -> None:
        require(self.rate >= 0 and math.isfinite(self.rate), f"adaptation.rate is {self.rate}: 0 or more is needed")
        for name in ("steps", "refinements"):
            require(getattr(self, name) >= 0, f"adaptation.{name} is {getattr(self, name)}: 0 or more is needed")


@dataclass(frozen=True)
class TrainingSettings:
    """The meta-training loop."""

    steps: int = setting(82_000, "meta-updates in all")
    tasks_per_step: int = setting(20, "the paper's B")
    rate: float = setting(1e-4, "the paper's beta, the rate of the meta-optimiser Adam")
    schedule: Literal["constant", "cosine"] = setting("constant", "rate over time: constant, or cosine to zero")
    augmentation: Literal["none", "flip", "flip_shift", "crop_colour"] = setting(
        "none", "training images mirrored; mirrored and shifted; or mirrored, cropped, and their colours changed"
    )
    task_ways: int | None = setting(
        None, "classes in a training task; 'none' takes episode.n_way. Others need a network for any number of classes"
    )
    task_queries: int | None = setting(None, "queries of each class in a training task; 'none' takes episode.n_query")
    task_refinements: int | None = setting(None, "adaptation.refinements in training; 'none' takes as many as at test")
    clip_norm: float | None = setting(1.0, "largest norm of the meta-gradient; 'none' does not clip")
    clip_applies_to: Literal["sum", "mean"] = setting(
        "sum", "clip the sum over tasks, then divide by B (released code), or clip their mean"
    )
    most_left_out: float = setting(
        0.1,
        "share of a step's tasks, but one in any case, that may blow up in their inner steps and be left out; 0: none",
    )
    tasks_per_chunk: int | None = setting(None, "tasks computed at once; fewer need less memory. 'none' takes all")
    seed: int = setting(0, "decides the initial weights, the tasks and the noise")
    validate_every: int = setting(1000, "steps between two validations")
    validation_tasks: int = setting(200, "tasks in one validation")
    save_every: int = setting(100, "steps between two checkpoints")
    log_every: int = setting(10, "steps between two lines of the log")

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "validate_every", "validation_tasks", "save_every", "log_every"):
            require(getattr(self, name) >= 1, f"training.{name} is {getattr(self, name)}: at least 1 is needed")
        require(self.validation_tasks >= 2, "training.validation_tasks is 1: an interval needs at least 2")
        for name, least in (("task_ways", 1), ("task_queries", 1), ("task_refinements", 0)):
            value = getattr(self, name)
            require(
                value is None or value >= least, f"training.{name} is {value}: {least} or more is needed, or 'none'"
            )
        require(self.rate > 0 and math.isfinite(self.rate), f"training.rate is {self.rate}: it must be above 0")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"training.clip_norm is {self.clip_norm}: it must be above 0, or 'none'",
        )
        require(
            self.tasks_per_chunk is None or self.tasks_per_chunk >= 1,
            f"training.tasks_per_chunk is {self.tasks_per_chunk}: at least 1 is needed, or 'none'",
        )
        require(0 <= self.most_left_out < 1, f"training.most_left_out is {self.most_left_out}: from 0 to below 1")
        require(0 <= self.seed < 2**63, f"training.seed is {self.seed}: it must be from 0 to 2**63 - 1")


@dataclass(frozen=True)
class Recipe:
    """Everything a training run is made from."""

    name: str
    summary: str
    dataset: str
    episode: EpisodeSpec = EpisodeSpec()
    protocol: Protocol = Protocol()
    model: ModelSettings = ModelSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    adaptation: AdaptationSettings = AdaptationSettings()
    training: TrainingSettings = TrainingSettings()

    def __post_init__(self) -> None:
        rounds = self.adaptation.refinements or self.training.task_refinements
        require(
            self.model.method == "trident" or not rounds,
            "adaptation.refinements is for TRIDENT: a Prototypical Network (model.method=protonet) has none",
        )
        require(
            self.model.classifier_start == "prototypes" or not rounds,
            "adaptation.refinements needs model.classifier_start=prototypes: there is nothing else to refine",
        )
