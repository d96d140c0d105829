"""From a few labelled pictures and a pile of others to labels for the pile.

The pile is labelled in chunks. The pictures of a chunk are looked at together: batch norm takes its statistics from
them and the labelled ones, and the prototypes are refined by them. So that no chunk is all of one kind, however the
pile was sorted, chunks are drawn at random (always in the same way) and are as equal in size as can be. A few pictures
do not refine anything, and for one alone the statistics are those of training.

Probabilities are at the weights' temperatures, which were fitted on validation tasks; they do not change a label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trident.data.images import ImageSource, UnreadableImageError, decode, strict_pillow
from trident.engines.execution import AnyLearner, execution_for, make_learner
from trident.errors import BadValueError, TridentError
from trident.learning.checkpoint import Checkpoint
from trident.learning.inner_loop import TaskBatch
from trident.measuring.evaluate import check_episode, default_chunk
from trident.measuring.prediction import encode_support, predict, predict_one_by_one
from trident.methods.trident.network import Encodings, Noise, TaskImages
from trident.nn.parameters import Parameters
from trident.settings import EpisodeSpec, Recipe

FEW = 2  # labelled pictures of a class, on average, up to which the 1-shot weights are taken
CHUNK = 100  # pictures of the pile that are looked at together, at most
ENOUGH_TOGETHER = 4  # pictures of a chunk for each class, from which on it is worth looking at them together
MOST_LABELLED = 1000  # pictures: all of them are in memory with each chunk
_AT_ONCE = 200  # pictures that are computed with at once, where each of the pile is looked at alone
Progress = Callable[[int, int], None]


def weights_for(n_pictures: int, n_classes: int) -> str:
    """The shipped weights that suit so many labelled photographs."""
    return "mini-5w1s-set" if n_pictures <= FEW * n_classes else "mini-5w5s-set"


def refuse_positional(recipe: Recipe) -> None:
    if recipe.model.positional:
        raise TridentError(
            "these weights have a positional AttFEX, one weight for each place in a task: a pile has no places, so "
            "give weights with model.attfex=set or off"
        )


def enough_together(n_pile: int, n_classes: int) -> bool:
    return n_pile >= ENOUGH_TOGETHER * n_classes


def recipe_for(recipe: Recipe, n_pile: int, n_classes: int) -> Recipe:
    """The recipe as it is best followed where so many pictures of the pile are looked at together.

    A few would refine the prototypes towards themselves and be too sure of it. For one alone, batch norm does better by
    the statistics of training; but weights that take inner steps have learned to take them with those of the images.
    """
    if enough_together(n_pile, n_classes):
        return recipe
    recipe = replace(recipe, adaptation=replace(recipe.adaptation, refinements=0))
    if n_pile > 1 or recipe.adaptation.steps or recipe.protocol.batch_norm != "transductive":
        return recipe
    return replace(recipe, protocol=replace(recipe.protocol, batch_norm="running"))


@dataclass(frozen=True)
class Labeller:
    """Trained weights and the labelled pictures they are to go by."""

    checkpoint: Checkpoint
    classes: tuple[str, ...]
    pictures: np.ndarray  # (picture, size, size, channel) uint8
    labels: np.ndarray  # (picture,) int64: places in `classes`
    device: str = "cpu"

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise BadValueError(f"there is one class only, '{self.classes[0]}': at least 2 are needed to choose from")
        missing = set(range(len(self.classes))) - set(self.labels.tolist())
        if missing:
            raise TridentError(f"class '{self.classes[min(missing)]}' has no labelled picture")
        if len(self.labels) > MOST_LABELLED:
            raise BadValueError(
                f"there are {len(self.labels)} labelled pictures: {MOST_LABELLED} at most can be looked at together, "
                "so give fewer of each class"
            )
        refuse_positional(self.checkpoint.recipe)
        check_episode(self.checkpoint.recipe, self._episode)

    @property
    def _episode(self) -> EpisodeSpec:
        """Shots may differ from class to class; where one number has to stand for them, it is the largest."""
        return EpisodeSpec(len(self.classes), int(np.bincount(self.labels).max()), 1)

    @property
    def size(self) -> int:
        return self.checkpoint.recipe.model.image_size

    @property
    def channels(self) -> int:
        return self.checkpoint.recipe.model.image_channels

    def _learner(self, n_pile: int) -> AnyLearner:
        recipe = replace(recipe_for(self.checkpoint.recipe, n_pile, len(self.classes)), episode=self._episode)
        running = {key: value.to(self.device) for key, value in self.checkpoint.running.items()}
        return make_learner(recipe, execution_for(self.device, "plain", "fp32", recipe), running)

    def __getstate__(self) -> dict[str, Any]:
        """To be pickled: without what can be computed again, which may lie on a GPU."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def _parameters(self) -> Parameters:
        return {key: value.to(self.device) for key, value in self.checkpoint.parameters.items()}

    def probabilities(self, queries: np.ndarray) -> np.ndarray:
        """Of each class for each of these pictures, looked at together: (picture, class) float64."""
        about, n = self.checkpoint, len(queries)
        if n == 1:  # the same there, and the labelled pictures are encoded already
            return self.probabilities_alone(queries)
        found = predict(self._learner(n), self._parameters, self._task(queries), about.recipe.adaptation.views)
        return _softmax(
            found[0], about.temperature if enough_together(n, len(self.classes)) else about.temperature_alone
        )

    def probabilities_alone(self, queries: np.ndarray) -> np.ndarray:
        """The same, but each picture is looked at with the labelled ones alone, so that no other can change it."""
        recipe = replace(self.checkpoint.recipe, episode=self._episode)
        at_once = max(1, _AT_ONCE // (len(self.pictures) + 1))
        if recipe.adaptation.steps:  # gradients need far more memory
            at_once = min(at_once, default_chunk(recipe, self.device))
        views = recipe.adaptation.views
        found = predict_one_by_one(
            self._learner(1), self._parameters, self._task(queries), at_once, views, self._encodings
        )
        return _softmax(found[0], self.checkpoint.temperature_alone)

    @cached_property
    def _encodings(self) -> list[Encodings] | None:
        """Of the labelled pictures, where those of the pile cannot change them: for one picture after the other."""
        views = self.checkpoint.recipe.adaptation.views
        return encode_support(self._learner(1), self._parameters, self._task(self.pictures[:0]).images, views)

    def _task(self, queries: np.ndarray) -> TaskBatch:
        """The labelled pictures and these others."""
        stored = torch.from_numpy(np.concatenate([self.pictures, queries])[None]).to(self.device)
        labels = torch.from_numpy(self.labels[None]).to(self.device)
        return TaskBatch(
            TaskImages(stored, labels),
            torch.zeros(1, len(queries), dtype=torch.int64, device=self.device),  # nobody knows them
            tuple(self._no_noise(len(self.pictures)) for _ in range(max(1, self.checkpoint.recipe.adaptation.steps))),
            (self._no_noise(len(queries)),),
        )

    def _no_noise(self, n: int) -> Noise:
        """The latents' means."""
        model = self.checkpoint.recipe.model

        def zeros(latents: int) -> Tensor:
            return torch.zeros(1, n, latents, device=self.device)

        return Noise(zeros(model.semantic_latents), zeros(model.label_latents))


def _softmax(log_probabilities: Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(log_probabilities.double() / temperature, -1).cpu().numpy()


@dataclass(frozen=True)
class Labelled:
    """What a labeller says of a pile."""

    classes: tuple[str, ...]
    probabilities: np.ndarray  # (picture, class) float64; a row of NaN for a picture that could not be read
    failures: dict[int, str] = field(default_factory=dict)  # why not, by the picture's place

    def ranking(self, picture: int) -> list[tuple[str, float]]:
        """Classes with their probabilities, the most likely first."""
        row = self.probabilities[picture]
        return [(self.classes[i], float(row[i])) for i in np.argsort(-row, kind="stable")]


def read_labelled(
    by_class: Mapping[str, Sequence[ImageSource]], size: int, channels: int
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The classes, their pictures and labels, as a `Labeller` takes them. A picture that cannot be read is an error."""
    with strict_pillow():
        pictures = [decode(source, size, channels) for sources in by_class.values() for source in sources]
    labels = [place for place, sources in enumerate(by_class.values()) for _ in sources]
    return tuple(by_class), np.stack(pictures), np.array(labels, np.int64)


def label_pile(
    labeller: Labeller, pile: Sequence[ImageSource], progress: Progress | None = None, together: bool = True
) -> Labelled:
    """Label all pictures of a pile, those of a chunk together or each alone. One chunk is in memory at a time."""
    probabilities = np.full((len(pile), len(labeller.classes)), np.nan)
    failures: dict[int, str] = {}
    done = 0
    for chunk in chunks(len(pile)):
        readable, pictures = [], []
        for place in chunk:
            try:
                with strict_pillow():
                    pictures.append(decode(pile[place], labeller.size, labeller.channels))
                readable.append(place)
            except UnreadableImageError as error:
                failures[place] = str(error)
        if pictures:
            say = labeller.probabilities if together else labeller.probabilities_alone
            probabilities[readable] = say(np.stack(pictures))
        done += len(chunk)
        if progress:
            progress(done, len(pile))
    return Labelled(labeller.classes, probabilities, dict(sorted(failures.items())))


def chunks(n: int, most: int = CHUNK) -> list[list[int]]:
    """All places of a pile, each in one chunk, drawn at random but always in the same way."""
    if n == 0:
        return []
    shuffled = np.random.default_rng(n).permutation(n)
    return [sorted(part.tolist()) for part in np.array_split(shuffled, -(-n // most))]
