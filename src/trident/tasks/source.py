"""From places in a store to tensors: the images, labels and noise of some tasks, where they are needed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trident.data.store import ImageStore
from trident.learning.inner_loop import TaskBatch
from trident.methods.trident.network import Noise, TaskImages
from trident.settings import AdaptationSettings, ModelSettings
from trident.tasks.augmentation import disguise, draw_guises
from trident.tasks.episodes import EpisodeSampler, task_generator

_on_device: dict[tuple[str, torch.device], Tensor] = {}


def _resident(store: ImageStore, device: torch.device) -> Tensor:
    """The whole store as uint8 on a GPU, one copy for training and validation; on the CPU the memory map serves."""
    key = (store.fingerprint, device)
    if key not in _on_device:
        _on_device.clear()
        whole = torch.empty(store.images.shape, dtype=torch.uint8, device=device)
        for start in range(0, len(whole), 4096):
            whole[start : start + 4096] = torch.from_numpy(np.array(store.images[start : start + 4096])).to(device)
        _on_device[key] = whole
    return _on_device[key]


class TaskSource:
    """Draws the tasks of one random stream, with their noise, so that task `i` is the same in any batch."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        model: ModelSettings,
        adaptation: AdaptationSettings,
        seed: int,
        stream: str,
        latents: str = "sample",
        predictions: int = 1,
        device: torch.device | str = "cpu",
        augmentation: str = "none",
    ):
        """`latents`: 'sample' draws noise for every latent, 'mean' none. `predictions`: noise draws for the queries."""
        self.sampler = sampler
        self.seed = seed
        self.stream = stream
        self.device = torch.device(device)
        self.sampled = latents != "mean"
        self.with_classes = model.training_classes > 0 and sampler.split == "train"
        self.sizes = (model.semantic_latents, model.label_latents)
        self.support_draws = max(1, adaptation.steps)  # a start from prototypes needs noise even without inner steps
        self.predictions = predictions
        self.augmentation = augmentation
        self.resident = None if self.device.type == "cpu" else _resident(sampler.store, self.device)

    def batch(self, indices: Sequence[int]) -> TaskBatch:
        episodes, noises, guises = [], [], []
        for index in indices:
            generator = task_generator(self.seed, self.stream, index)
            episodes.append(self.sampler.draw(generator))
            noises.append(self._noise(generator))
            if self.augmentation != "none":
                size, n_images = self.sampler.store.image_size, self.sampler.spec.n_images
                guises.append(draw_guises(self.augmentation, n_images, size, generator))
        support, support_labels, query, query_labels, classes = (np.stack(part) for part in zip(*episodes, strict=True))
        stacked = [
            Noise(*(torch.from_numpy(np.stack(part)).to(self.device) for part in zip(*draws, strict=True)))
            for draws in zip(*noises, strict=True)
        ]
        stored = self._stored(np.concatenate([support, query], 1))
        stored = disguise(stored, guises) if guises else stored
        query_classes = torch.from_numpy(np.take_along_axis(classes, query_labels, 1)).to(self.device)
        return TaskBatch(
            TaskImages(stored, torch.from_numpy(support_labels).to(self.device)),
            torch.from_numpy(query_labels).to(self.device),
            tuple(stacked[: self.support_draws]),
            tuple(stacked[self.support_draws :]),
            query_classes if self.with_classes else None,
        )

    def _noise(self, generator: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each inner step the support's, then for each prediction the queries': (image, latent) each."""
        spec = self.sampler.spec
        rows = [spec.n_support] * self.support_draws + [spec.n_queries] * self.predictions

        def draw(shape: tuple[int, int]) -> np.ndarray:
            return generator.standard_normal(shape, np.float32) if self.sampled else np.zeros(shape, np.float32)

        semantic, label = self.sizes
        return [(draw((n, semantic)), draw((n, label))) for n in rows]

    def _stored(self, places: np.ndarray) -> Tensor:
        """(task, image, height, width, channel) uint8."""
        if self.resident is None:
            return torch.from_numpy(self.sampler.store.images[places])
        return self.resident[torch.from_numpy(places).to(self.device)]
