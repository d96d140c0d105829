"""Few-shot episodes and how they are drawn.

Task `i` of a sampler depends only on (seed, stream, i), so the same seed gives the same tasks on any machine, in any
order and in any chunking. Under every protocol it has the same classes and the same support images, and under both
query orders the same queries, so differences between protocols are paired.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trident.data.store import ClassEntry, ImageStore
from trident.errors import TridentError
from trident.settings import EpisodeSpec, Protocol

# Random streams of one seed that must never overlap. `selection` draws the validation tasks that choose a run's best
# weights, so that no later measurement on validation classes uses them again. `temperature` draws those that fit a
# temperature where validation classes are scored.
STREAMS = {"train": 1, "val": 2, "test": 3, "train-evaluation": 4, "selection": 5, "temperature": 6}


UNLABELLED = -1


class Episode(NamedTuple):
    """Indices into the store. Support images are sorted by class; the protocol decides the query order."""

    support: np.ndarray  # (n_support,) int64
    support_labels: np.ndarray  # (n_support,) int64 in 0 .. n_way - 1
    query: np.ndarray  # (n_queries,) int64
    query_labels: np.ndarray  # (n_queries,) int64; UNLABELLED for images that do not count
    classes: np.ndarray  # (n_way,) int64: indices among the classes of the split


def task_generator(seed: int, stream: str, index: int) -> np.random.Generator:
    """The source of all randomness of one task."""
    return np.random.default_rng((seed, STREAMS[stream], index))


@dataclass(frozen=True)
class EpisodeSampler:
    """Draws episodes from the classes of one split of a store."""

    store: ImageStore
    split: str
    spec: EpisodeSpec
    protocol: Protocol
    classes: tuple[ClassEntry, ...] = field(init=False)

    def __post_init__(self) -> None:
        classes = self.store.classes_of(self.split)
        if len(classes) < self.spec.n_way + self.spec.distractors:
            others = f" with {self.spec.distractors} distractors" if self.spec.distractors else ""
            raise TridentError(
                f"{self.store.dataset} has {len(classes)} {self.split} classes, too few for {self.spec.n_way}-way tasks"
                + others
            )
        if self.spec.n_unlabelled and self.protocol.queries_at_once == "one":
            raise TridentError("protocol.queries_at_once is 'one': a query that is alone has no unlabelled images")
        unlabelled = self.spec.n_unlabelled
        needed = self.spec.n_shot + unlabelled + (self.spec.n_query if self.protocol.balance == "balanced" else 1)
        smallest = min(classes, key=lambda entry: entry.count)
        if smallest.count < needed:
            more = f" and {unlabelled} unlabelled images" if unlabelled else ""
            raise TridentError(
                f"class '{smallest.name}' of {self.store.dataset} has {smallest.count} images, too few for "
                f"{self.spec.n_shot}-shot tasks with {self.spec.n_query} queries{more}: {needed} are needed"
            )
        if self.protocol.balance == "one_absent" and self.spec.n_way < 2:
            raise TridentError("protocol.balance is 'one_absent': tasks need at least 2 classes")
        if self.protocol.balance != "balanced":
            n_present = self.spec.n_way - (self.protocol.balance == "one_absent")
            room = sum(sorted(entry.count - self.spec.n_shot - unlabelled for entry in classes)[:n_present])
            if room < self.spec.n_counted:
                raise TridentError(
                    f"the smallest {n_present} {self.split} classes of {self.store.dataset} leave {room} images "
                    f"for queries, too few for {self.spec.n_counted}"
                )
        object.__setattr__(self, "classes", classes)

    def draw(self, generator: np.random.Generator) -> Episode:
        spec = self.spec
        # Generators of their own, so that everything else is the same as in a balanced task without unlabelled images.
        for_counts, for_unlabelled = generator.spawn(2)
        classes = generator.choice(len(self.classes), spec.n_way, replace=False)
        chosen = [self.classes[i] for i in classes]
        if self.protocol.balance == "balanced":
            counts = [spec.n_query] * spec.n_way
        else:
            proportions = self._proportions(for_counts)
            room = [entry.count - spec.n_shot - spec.n_unlabelled for entry in chosen]
            if self.protocol.balance == "one_absent":
                room = [count * (share > 0) for count, share in zip(room, proportions, strict=True)]
            counts = _share_out(spec.n_counted, proportions, room)
        support, query, unlabelled = [], [], []
        for entry, count in zip(chosen, counts, strict=True):
            places = entry.start + generator.permutation(entry.count)
            support.append(places[: spec.n_shot])
            query.append(places[spec.n_shot : spec.n_shot + count])
            unlabelled.append(places[spec.n_shot + count :][: spec.n_unlabelled])
        ways = np.arange(spec.n_way)
        query_places, query_labels = np.concatenate(query), np.repeat(ways, counts)
        # Drawn for both query orders, so that all later draws are the same.
        permutation = generator.permutation(spec.n_counted)
        if self.protocol.query_order == "shuffled":
            query_places, query_labels = query_places[permutation], query_labels[permutation]
        if spec.n_unlabelled:
            query_places, query_labels = self._among_unlabelled(
                query_places, query_labels, unlabelled, classes, for_unlabelled
            )
        return Episode(np.concatenate(support), np.repeat(ways, spec.n_shot), query_places, query_labels, classes)

    def _among_unlabelled(
        self,
        query_places: np.ndarray,
        query_labels: np.ndarray,
        unlabelled: list[np.ndarray],
        classes: np.ndarray,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The queries with unlabelled images between them, or after them if the queries are sorted by class."""
        others = np.setdiff1d(np.arange(len(self.classes)), classes)
        for i in generator.choice(others, self.spec.distractors, replace=False):
            entry = self.classes[i]
            unlabelled.append(entry.start + generator.permutation(entry.count)[: self.spec.n_unlabelled])
        places = np.concatenate([query_places, *unlabelled])
        labels = np.concatenate([query_labels, np.full(len(places) - len(query_places), UNLABELLED)])
        order = (
            generator.permutation(len(places)) if self.protocol.query_order == "shuffled" else np.arange(len(places))
        )
        return places[order], labels[order]

    def _proportions(self, generator: np.random.Generator) -> np.ndarray:
        """The classes' shares of the queries."""
        if self.protocol.balance == "one_absent":
            present = self.spec.n_way - 1
            return generator.permutation([1 / present] * present + [0.0])  # any label may be that of the absent class
        return np.asarray(generator.dirichlet([self.protocol.dirichlet_alpha] * self.spec.n_way))


def _share_out(total: int, proportions: np.ndarray, room: Sequence[int]) -> list[int]:
    """Whole numbers that sum to `total`, as close to the proportions as rounding and `room` allow."""
    wanted = proportions * total
    counts = np.minimum(np.floor(wanted).astype(int), room)
    while counts.sum() < total:
        shortfall = np.where(counts < np.asarray(room), wanted - counts, -np.inf)
        counts[int(shortfall.argmax())] += 1
    return [int(count) for count in counts]
