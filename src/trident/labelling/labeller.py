"""Labels a pile of pictures with weights trained here, from a few labelled ones.

The pile is labelled in chunks. The pictures of a chunk are classified together: batch norm takes its statistics from
them and the labelled ones, and the method may learn from them. Chunks are drawn at random with a fixed seed and have
about equal sizes, so that a chunk has many classes even if the pile is sorted. The method does not learn from small
chunks. For a single picture, batch norm uses the statistics of training.

Probabilities are scaled by temperatures, which were fitted on validation tasks. Temperatures do not change labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch

from trident.data.decoding_process import decoders
from trident.data.images import ImageSource, Target, UnreadableImageError
from trident.data.store import ImageStore
from trident.engines.execution import execution_for, make_learner
from trident.engines.learner import Learner
from trident.errors import TridentError
from trident.labelling.labelled import Labelled, check_labels
from trident.learning.checkpoint import Checkpoint, Temperatures
from trident.measuring.calibration import fit_temperature, softmax
from trident.measuring.evaluate import evaluate
from trident.measuring.prediction import encode_support, predict, predict_one_by_one
from trident.measuring.subject import Sample, default_chunk
from trident.methods.base import Method
from trident.methods.inner_loop.base import Encodings
from trident.nn.parameters import Parameters, on_device
from trident.progress import Progress
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec
from trident.tasks.task import Task

FEW_QUERIES = 2  # for each class: too few to learn from, see `recipe_for`
CHUNK = 100  # most pictures classified together
ENOUGH_TOGETHER = 4  # pictures for each class; the method does not learn from smaller chunks
MOST_LABELLED = 1000  # pictures: all of them are in memory with each chunk
_AT_ONCE = 200  # pictures computed at once, when each is classified alone


def refuse_positional(method: Method) -> None:
    if method.positional:
        raise TridentError(
            "these weights have a positional AttFEX, one weight for each position in a task: the pictures of a pile "
            "have no positions, so use weights with method.attfex=set or off"
        )


def enough_together(n_pile: int, n_classes: int) -> bool:
    return n_pile >= ENOUGH_TOGETHER * n_classes


def recipe_for(recipe: Recipe, n_pile: int, n_classes: int) -> Recipe:
    """The recipe that predicts best if `n_pile` pictures are classified together.

    A few pictures would mislead a method that learns from them. For a single picture, batch norm works better with the
    statistics of training. Weights with inner steps keep the statistics of the images, as in training.
    """
    if enough_together(n_pile, n_classes):
        return recipe
    recipe = replace(recipe, method=recipe.method.for_few_queries())
    if n_pile > 1 or recipe.method.inner_steps or recipe.protocol.batch_norm != "transductive":
        return recipe
    return replace(recipe, protocol=replace(recipe.protocol, batch_norm="running"))


@dataclass(frozen=True)
class Labeller:
    """Trained weights and the labelled pictures."""

    checkpoint: Checkpoint
    classes: tuple[str, ...]
    pictures: np.ndarray  # (picture, size, size, channel) uint8
    labels: np.ndarray  # (picture,) int64: indices into `classes`
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_labels(self.classes, self.labels, MOST_LABELLED)
        recipe = self.checkpoint.recipe
        refuse_positional(recipe.method)
        recipe.method.check_episode(recipe.episode, self._episode)

    @property
    def _episode(self) -> EpisodeSpec:
        """Classes may have different numbers of shots; n_shot is the largest."""
        return EpisodeSpec(len(self.classes), int(np.bincount(self.labels).max()), 1)

    @property
    def calibrated(self) -> bool:
        return self.checkpoint.temperatures != Temperatures()

    def describe(self) -> str:
        return self.checkpoint.describe()

    def learner(self, n_pile: int) -> Learner:
        """The learner for `n_pile` pictures that are classified together."""
        recipe = replace(recipe_for(self.checkpoint.recipe, n_pile, len(self.classes)), episode=self._episode)
        running = on_device(self.checkpoint.running, self.device)
        return make_learner(recipe, execution_for(self.device, "plain", "fp32", recipe), running)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without cached values, which may be on a GPU."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def parameters(self) -> Parameters:
        return on_device(self.checkpoint.parameters, self.device)

    def probabilities(self, queries: np.ndarray) -> np.ndarray:
        """Class probabilities of these pictures, classified together: (picture, class) float64."""
        checkpoint, n = self.checkpoint, len(queries)
        if n == 1:  # the same result, with cached encodings
            return self.probabilities_alone(queries)
        logits = predict(self.learner(n), self.parameters, self.task(queries), checkpoint.recipe.views)
        many = enough_together(n, len(self.classes))
        temperature = checkpoint.temperatures.many if many else checkpoint.temperatures.few
        return softmax(logits[0].double().cpu().numpy() / temperature)

    def probabilities_alone(self, queries: np.ndarray) -> np.ndarray:
        """Class probabilities of pictures that are classified alone, so that none depends on the others."""
        recipe = replace(self.checkpoint.recipe, episode=self._episode)
        at_once = max(1, _AT_ONCE // (len(self.pictures) + 1))
        if recipe.method.inner_steps:  # gradients need far more memory
            at_once = min(at_once, default_chunk(recipe, self.device))
        known = self._encodings
        task = self.task(queries, with_support=known is None)
        logits = predict_one_by_one(self.learner(1), self.parameters, task, at_once, recipe.views, known)
        return softmax(logits[0].double().cpu().numpy() / self.checkpoint.temperatures.alone)

    @cached_property
    def _encodings(self) -> list[Encodings] | None:
        """Encodings of the labelled pictures, for single pictures; None if they depend on the pile."""
        return encode_support(
            self.learner(1), self.parameters, self.task(self.pictures[:0]), self.checkpoint.recipe.views
        )

    def label(self, pile: Sequence[ImageSource], progress: Progress | None = None, together: bool = True) -> Labelled:
        """Label a pile chunk by chunk, or each picture alone. One chunk is in memory at a time."""
        probabilities = np.full((len(pile), len(self.classes)), np.nan)
        failures: dict[int, str] = {}
        _, *size, channels = self.pictures.shape
        done, target = 0, Target(size[0], channels)
        for chunk in chunks(len(pile)):
            readable, pictures = [], []
            for place in chunk:
                try:
                    pictures.append(decoders.decode(pile[place], target))
                    readable.append(place)
                except UnreadableImageError as error:
                    failures[place] = str(error)
            if pictures:
                classify = self.probabilities if together else self.probabilities_alone
                probabilities[readable] = classify(np.stack(pictures))
            done += len(chunk)
            if progress:
                progress(done, len(pile))
        return Labelled(self.classes, probabilities, dict(sorted(failures.items())))

    def task(self, queries: np.ndarray, with_support: bool = True) -> Task:
        """The labelled pictures and these queries as a task, with latent means if the method has latents."""
        stored = np.concatenate([self.pictures, queries]) if with_support else queries
        recipe = self.checkpoint.recipe
        shape = EpisodeSpec(1, max(1, len(self.pictures)), max(1, len(queries)))
        sizes = {"support": len(self.pictures), "query": len(queries)}
        noise = {
            name: torch.zeros(1, sizes.get(name.split("/")[0], rows), size, device=self.device)
            for name, (rows, size) in recipe.model.noise_shapes(shape, 1).items()
        }
        labels = torch.from_numpy(self.labels[None]).to(self.device)
        return Task(torch.from_numpy(stored[None]).to(self.device), labels, len(self.classes), noise)


def read_labelled(
    by_class: Mapping[str, Sequence[ImageSource]], size: int, channels: int
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The classes, their pictures and labels, as a `Labeller` takes them. A picture that cannot be read is an error."""
    target = Target(size, channels)
    pictures = [decoders.decode(source, target) for sources in by_class.values() for source in sources]
    labels = [place for place, sources in enumerate(by_class.values()) for _ in sources]
    return tuple(by_class), np.stack(pictures), np.array(labels, np.int64)


def chunks(n: int, most: int = CHUNK) -> list[list[int]]:
    """Split the indices of a pile into random chunks, with a fixed seed."""
    if n == 0:
        return []
    shuffled = np.random.default_rng(n).permutation(n)
    return [sorted(part.tolist()) for part in np.array_split(shuffled, -(-n // most))]


def fit_temperatures(
    checkpoint: Checkpoint,
    store: ImageStore,
    progress: Callable[[int, int, str], None],
    **sample: Unpack[Sample],
) -> Temperatures:
    """The temperatures for labelling, on validation tasks: for many pictures together, a few, and single ones."""
    recipe = checkpoint.recipe

    def fitted(recipe: Recipe, what: str) -> float:
        def report(done: int, total: int) -> None:
            progress(done, total, f"validation tasks, {what}")

        result = evaluate(replace(checkpoint, recipe=recipe), store, progress=report, **sample)
        return round(fit_temperature(result.predictions), 3)

    recipe = replace(recipe, episode=replace(recipe.episode, n_unlabelled=0, distractors=0))
    many = fitted(recipe, "many queries together")
    if recipe.method.positional or recipe.method.inner_steps:
        # Positional weights cannot label pictures. With inner steps, single queries would take too long.
        return Temperatures(many, many, many)
    n_way = recipe.episode.n_way
    few = recipe_for(recipe, FEW_QUERIES * n_way, n_way)
    few = replace(few, episode=replace(few.episode, n_query=FEW_QUERIES))
    one = recipe_for(recipe, 1, n_way)
    one = replace(one, protocol=replace(one.protocol, queries_at_once="one"))
    return Temperatures(many, fitted(few, "few queries together"), fitted(one, "queries alone"))
