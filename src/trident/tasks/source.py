"""From positions in a store to tensors: the images, labels and noise of some tasks, or batches of single images."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch import Tensor

from trident.data.store import ImageStore, positions_of
from trident.tasks.augmentation import augment, draw_augmentations
from trident.tasks.episodes import EpisodeSampler, task_generator
from trident.tasks.images import Images
from trident.tasks.task import Batch, Labels, Task

NoiseShapes = Mapping[str, tuple[int, int]]  # by name: images of the set, numbers for each image; "task/": any rows


class Source(ABC):
    """What training and measuring draw batches from. Batch `i` depends on the seed and on `i` alone."""

    images: Images
    device: torch.device | str

    @property
    def dataset(self) -> str:
        return self.images.store.dataset

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch: ...

    def prefetch(self, indices: Sequence[int]) -> Callable[[], Batch]:
        """Draw a batch ahead, in a background thread if its images are on the host; the result waits for it."""
        if self.images.gathers:
            return self.images.background.start(lambda: self.batch(indices))
        batch = self.batch(indices)
        return lambda: batch

    def prefetched(self, chunks: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Yield one batch after another. Each is drawn while the one before it is in use."""
        upcoming: Callable[[], Batch] | None = None
        for indices in chunks:
            current, upcoming = upcoming, self.prefetch(indices)
            if current is not None:
                yield current()
        if upcoming is not None:
            yield upcoming()


@dataclass(eq=False)
class TaskSource(Source):
    """Draws the tasks of one random stream, with their noise, so that task `i` is the same in any batch."""

    sampler: EpisodeSampler
    noise_shapes: NoiseShapes
    seed: int
    stream: str
    _: KW_ONLY
    sampled: bool = True  # draw noise; otherwise it is zero, which gives latent means
    device: torch.device | str = "cpu"
    augmentation: str = "none"
    with_training_classes: bool = False

    def __post_init__(self) -> None:
        self.images = Images(self.sampler.store, self.device)

    def batch(self, indices: Sequence[int]) -> Batch:
        spec, store, on_device = self.sampler.spec, self.sampler.store, self.images.on_device
        episodes, noises, augmentations = [], [], []
        for index in indices:
            generator = task_generator(self.seed, self.stream, index)
            episodes.append(self.sampler.draw(generator))
            noises.append({name: self._noise(generator, shape) for name, shape in self.noise_shapes.items()})
            if self.augmentation != "none":
                augmentations.append(draw_augmentations(self.augmentation, spec.n_images, store.image_size, generator))
        support, support_labels, query, query_labels, classes = (np.stack(part) for part in zip(*episodes, strict=True))
        images = self.images.at(np.concatenate([support, query], 1))
        images = augment(images, augmentations) if augmentations else images
        noise = {name: on_device(np.stack([one[name] for one in noises])) for name in self.noise_shapes}
        training_classes = None
        if self.with_training_classes:
            training_classes = on_device(np.take_along_axis(classes, query_labels, 1))
        task = Task(images, on_device(support_labels), spec.n_way, noise)
        return Batch(task, Labels(on_device(query_labels), training_classes))

    def _noise(self, generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return generator.standard_normal(shape, np.float32) if self.sampled else np.zeros(shape, np.float32)


@dataclass(eq=False)
class ClassSource(Source):
    """Draws batches of single images from all training classes: tasks whose queries they are, without support sets."""

    store: ImageStore
    images_per_step: int
    seed: int
    device: torch.device | str = "cpu"
    augmentation: str = "none"
    noise_shapes: NoiseShapes = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = self.store.classes_of("train")
        self.images = Images(self.store, self.device)
        self.n_classes = len(entries)
        self.positions = positions_of(entries)
        self.classes = np.repeat(np.arange(len(entries)), [entry.count for entry in entries])
        self.n_images = min(self.images_per_step, len(self.positions))

    def batch(self, indices: Sequence[int]) -> Batch:
        images, labels, noises = zip(*(self._one(index) for index in indices), strict=True)
        noise = {name: self.images.on_device(np.stack([one[name] for one in noises])) for name in self.noise_shapes}
        no_support = torch.zeros(len(indices), 0, dtype=torch.int64, device=self.images.device)
        truth = self.images.on_device(np.stack(labels))
        return Batch(Task(torch.cat(images), no_support, self.n_classes, noise), Labels(truth, truth))

    def _one(self, index: int) -> tuple[Tensor, np.ndarray, dict[str, np.ndarray]]:
        generator = task_generator(self.seed, "train", index)
        chosen = generator.choice(len(self.positions), self.n_images, replace=False)
        images = self.images.at(self.positions[chosen][None])
        if self.augmentation != "none":
            drawn = draw_augmentations(self.augmentation, self.n_images, self.store.image_size, generator)
            images = augment(images, [drawn])
        noise = {name: generator.standard_normal(shape, np.float32) for name, shape in self.noise_shapes.items()}
        return images, self.classes[chosen], noise
