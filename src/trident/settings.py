"""The settings that every recipe has: episodes, protocol, views and training. Nothing here imports torch.

A backbone and a method have their own settings, as fields of their classes.
"""

import functools
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from trident.errors import TridentError

LARGEST = 1e9  # of a setting that does not state its own largest value, positive or negative


def setting(
    default: Any,
    help: str,
    after_training: bool = False,
    most: float = LARGEST,
    least: float | None = None,
    above: float | None = None,
) -> Any:
    """A settings field. `after_training`: it may be changed for trained weights. `most`: the largest value.

    `least`, or `above`: the smallest value, or what it must be above; 'none' is allowed. `check_bounds` checks them.
    Recipes may come from untrusted sources, in weights files: the largest values keep them from asking for more memory
    or time than a machine has.
    """
    facts = {"help": help, "after_training": after_training, "most": most, "least": least, "above": above}
    return field(default=default, metadata=facts)


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The type of each field of a dataclass. They are kept, because finding them takes long."""
    return typing.get_type_hints(kind)


def check_largest(key: str, value: Any, most: float) -> None:
    """Check a setting's value if it is a number: it must be finite and not too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise TridentError(f"{key} is {value}: it must be a finite number")
    if abs(value) > most:
        raise TridentError(f"{key} is {value:.10g}: it must be at most {most:.10g}")


def check_bounds(settings: Any, section: str) -> None:
    """Check that the numbers among these settings are finite, and not too small; a subclass keeps its bases' bounds."""
    for name, least, above in _bounds_of(settings.__class__):
        value = getattr(settings, name)
        if isinstance(value, int | float):
            finite = not isinstance(value, float) or math.isfinite(value)
            fits = finite and (above is None or value > above)
            more = "" if above is None else f"above {above:g}, and "
            require(fits, f"{section}.{name} is {value}: it must be {more}finite")
            require(least is None or value >= least, f"{section}.{name} is {value}: {least} or more is needed")


@functools.cache
def _bounds_of(kind: type) -> list[tuple[str, float | None, float | None]]:
    """The name of each field of a dataclass and its bases, with its bounds."""
    entries = [entry for base in kind.__mro__ for entry in getattr(base, "__dataclass_fields__", {}).values()]
    return list(dict.fromkeys((each.name, each.metadata.get("least"), each.metadata.get("above")) for each in entries))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise TridentError(message)


def require_at_least(settings: Any, section: str, least: float, *names: str) -> None:
    """Check that these settings are finite and not too small; 'none' is allowed."""
    for name in names:
        value = getattr(settings, name)
        fits = value is None or (math.isfinite(value) and value >= least)
        require(fits, f"{section}.{name} is {value}: {least:g} or more is needed")


@dataclass(frozen=True)
class EpisodeSpec:
    """An N-way K-shot task with Q queries for each class."""

    n_way: int = setting(5, "classes in a task", most=10_000, least=1)
    n_shot: int = setting(1, "labelled images of each class", most=10_000, least=1)
    n_query: int = setting(10, "images to label, of each class (on average, if unbalanced)", most=10_000, least=1)
    n_unlabelled: int = setting(
        0,
        "further images of each class in a measured task: a method sees them as it sees queries, but they do not count",
        most=10_000,
        least=0,
    )
    distractors: int = setting(
        0, "further classes of a measured task, with unlabelled images only", most=10_000, least=0
    )

    def __post_init__(self) -> None:
        check_bounds(self, "episode")
        require(
            self.n_unlabelled > 0 or self.distractors == 0,
            f"episode.distractors is {self.distractors}: it needs episode.n_unlabelled, their images",
        )

    def describe(self) -> str:
        return f"{self.n_way}-way {self.n_shot}-shot"

    def describe_queries(self) -> str:
        others = f" and of {self.distractors} other classes" if self.distractors else ""
        images = "image" if self.n_unlabelled == 1 else "images"
        unlabelled = f", {self.n_unlabelled} unlabelled {images} of each class{others}" if self.n_unlabelled else ""
        return f"{self.n_query} queries per class{unlabelled}"

    @property
    def n_support(self) -> int:
        return self.n_way * self.n_shot

    @property
    def n_counted(self) -> int:
        """Queries whose answers count."""
        return self.n_way * self.n_query

    @property
    def n_queries(self) -> int:
        """All images that are classified, the unlabelled ones included."""
        return self.n_counted + (self.n_way + self.distractors) * self.n_unlabelled

    @property
    def n_images(self) -> int:
        return self.n_support + self.n_queries


@dataclass(frozen=True)
class Protocol:
    """How a number was measured. Every accuracy has one."""

    query_order: Literal["shuffled", "class_sorted"] = setting(
        "shuffled", "class_sorted reveals the classes of the queries to a positional AttFEX: see the README"
    )
    balance: Literal["balanced", "dirichlet", "one_absent"] = setting(
        "balanced",
        "exactly n_query queries of each class; Dirichlet-distributed counts; or none of one class, more of the others",
    )
    queries_at_once: Literal["all", "one"] = setting("all", "one: each query is classified alone, in a task of its own")
    dirichlet_alpha: float = setting(2.0, "concentration of the Dirichlet distribution")
    batch_norm: Literal["transductive", "support", "running"] = setting(
        "transductive", "statistics of the current images (as the paper), of the support set, or of training"
    )
    latents: Literal["sample", "mean", "average"] = setting(
        "mean", "latents at test: one sample, the mean, or the average of many predictions"
    )
    latent_samples: int = setting(10, "number of samples for latents=average", most=10_000, least=1)

    def __post_init__(self) -> None:
        require(
            0 < self.dirichlet_alpha < 1e6,
            f"protocol.dirichlet_alpha is {self.dirichlet_alpha}: it must be above 0 and below 1e6",
        )
        check_bounds(self, "protocol")

    def describe(self, latents: bool = True, batch_norm: bool = True) -> str:
        """In words. Latents and batch norm are omitted if the method has none."""
        order = f"{self.query_order.replace('_', '-')} queries"
        balance = {
            "balanced": "balanced",
            "dirichlet": f"Dirichlet({self.dirichlet_alpha:g}) class counts",
            "one_absent": "no queries of one class",
        }[self.balance]
        taken = {"sample": "one latent sample", "mean": "latent means"}.get(
            self.latents, f"average of {self.latent_samples} latent samples"
        )
        parts = [order, *(["one query at a time"] if self.queries_at_once == "one" else []), balance]
        parts += [f"{self.batch_norm} batch norm"] if batch_norm else []
        return ", ".join([*parts, *([taken] if latents else [])])


@dataclass(frozen=True)
class Views:
    """Extra views of the images for predictions, not for training."""

    mirrored: bool = setting(False, "predict from the mirror images too")
    corners: bool = setting(
        False, "predict from the four corners of the images too, each 6/7 wide; with views.mirrored, two are mirrored"
    )
    shifted: bool = setting(
        False, "predict from the images shifted to the upper left and lower right too, by 1/42 of their size"
    )
    average: Literal["probabilities", "features"] = setting(
        "probabilities",
        "what is averaged over the views: probabilities, or features of methods that classify a backbone's features, "
        "which helps some of them and harms others",
    )

    @property
    def number(self) -> int:
        """The number of views, including the image itself."""
        return (1 + 2 * self.shifted) * (1 + self.mirrored) + 4 * self.corners

    def describe(self) -> str:
        views = {"mirror images": self.mirrored, "shifted images": self.shifted, "corners": self.corners}
        names = [name for name, used in views.items() if used]
        average = ", mean features" if self.average == "features" else ""
        return f", {' and '.join(names)} too{average}" if names else ""


@dataclass(frozen=True)
class TrainingSettings:
    """The outer loop."""

    steps: int = setting(82_000, "number of meta-updates", most=1_000_000_000, least=1)
    tasks_per_step: int = setting(
        20, "tasks in a meta-update, the paper's B (methods trained on episodes)", most=100_000, least=1
    )
    images_per_step: int = setting(
        256, "images in an update (methods trained on batches of all training classes)", most=1_000_000, least=1
    )
    start_from: str | None = setting(
        None,
        "trained weights to start from, where the networks match: a name that 'trident weights' lists, a path, or "
        "recipe:NAME to train that recipe first, as the first stage of the run",
    )
    rate: float = setting(1e-4, "learning rate of Adam in the outer loop, the paper's beta", above=0)
    backbone_rate: float = setting(1.0, "learning rate of the backbone, as a multiple of the rate", least=0)
    weight_decay: float = setting(0.0, "decoupled weight decay (AdamW) in the outer loop", least=0)
    schedule: Literal["constant", "cosine"] = setting("constant", "rate over time: constant, or cosine to zero")
    augmentation: Literal["none", "flip", "flip_shift", "crop_colour"] = setting(
        "none", "training images are mirrored; mirrored and shifted; or mirrored, cropped and recoloured"
    )
    noise: bool = setting(
        True, "draw the noise of latents and other random quantities in training tasks; 'false' takes their means"
    )
    task_ways: int | None = setting(
        None,
        "classes in a training task; 'none' takes episode.n_way. Others need a method for any number of classes",
        most=10_000,
        least=1,
    )
    task_queries: int | None = setting(
        None, "queries of each class in a training task; 'none' takes episode.n_query", most=10_000, least=1
    )
    clip_norm: float | None = setting(1.0, "largest norm of the meta-gradient; 'none' does not clip", above=0)
    clip_applies_to: Literal["sum", "mean"] = setting(
        "sum", "clip the sum over tasks, then divide by B (released code), or clip their mean"
    )
    most_left_out: float = setting(
        0.1,
        "largest share of a step's tasks that may be left out because their loss or gradient is not finite: at least "
        "one task, unless it is 0. For methods with inner steps; others stop at the first such task",
        least=0,
    )
    tasks_per_chunk: int | None = setting(
        None, "tasks computed at once; fewer need less memory. 'none' takes all", most=100_000, least=1
    )
    seed: int = setting(0, "random seed of the initial weights, the tasks and the noise", most=2**63 - 1, least=0)
    validate_every: int = setting(1000, "steps between two validations", most=1_000_000_000, least=1)
    validation_tasks: int = setting(
        200, "tasks in one validation, which needs two for an interval", most=1_000_000, least=2
    )
    save_every: int = setting(100, "steps between two checkpoints", most=1_000_000_000, least=1)
    log_every: int = setting(10, "steps between two lines of the log", most=1_000_000_000, least=1)

    def __post_init__(self) -> None:
        check_bounds(self, "training")
        left_out = self.most_left_out
        require(left_out < 1, f"training.most_left_out is {left_out}: it must be 0 or more, and below 1")
