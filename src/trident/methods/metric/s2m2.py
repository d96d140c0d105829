"""S2M2 (Mangla et al. 2020)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trident.backbones.conv4 import first_layer_input, single_conv4
from trident.methods.base import About, Backbone, HeadModel, NoiseShapes, TrainingStep, cross_entropy
from trident.methods.metric.baseline_plus_plus import BaselinePlusPlus
from trident.nn.batch_norm import BatchNormStatistics
from trident.nn.linear import Linear, linear
from trident.nn.parameters import Parameters, for_each_task
from trident.settings import require, setting
from trident.tasks.task import Batch

MIXING = "query/mixing"  # noise: three numbers for the share, one for the place
ROTATIONS = 4


@dataclass(frozen=True)
class S2M2(BaselinePlusPlus):
    """Baseline++ on features that were trained with rotated pictures and mixed feature maps.

    Learned: the backbone, with a cosine classifier of all training classes and a linear layer that tells by how much a
    picture is rotated; both are not used afterwards. A training step minimises the sum of

        mixed      the cross-entropy of all images when what a random block of the network takes is
                   u (maps of an image) + (1 - u) (maps of another),   u ~ Beta(2, 2);   both classes count, u and 1 - u
        rotated    the cross-entropies of class and rotation, with weight `rotation_weight` each,
                   of a quarter of the images, turned by 0, 90, 180 and 270 degrees

    At test a cosine classifier is fitted to the support set as in Baseline++ (`baseline_plus_plus.py`).

    The published training first minimises `rotated` alone, on all images, and adds `mixed` later; here both are
    minimised all the time. The statistics that batch norm uses at test are those of rotated pictures, not of mixtures.
    """

    about = About(
        "S2M2", "Mangla et al. 2020", "Charting the Right Manifold: Manifold Mixup for Few-shot Learning", "classes"
    )  # fmt: skip
    rotation_weight: float = setting(0.5, "weight of each of the two losses of rotated pictures", least=0)
    blocks: int = setting(4, "number of the network's first blocks whose inputs may be mixed", most=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.blocks <= 4, f"method.blocks is {self.blocks}: it must be from 1 to 4")

    def check_training(self, backbone: Backbone) -> None:
        single_conv4(backbone, self.about.title)  # training reaches into the network

    def initial(self, n_features: int, generator: torch.Generator) -> Parameters:
        rotations = Linear("rotations", n_features, ROTATIONS)
        return super().initial(n_features, generator) | rotations.initial(generator)

    def batch_noise(self) -> NoiseShapes:
        return {MIXING: (1, 4)}

    def mixing(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The share u and the block, (task,) each, from standard normal noise (task, 1, 4)."""
        uniform = torch.special.ndtr(noise[:, 0])  # (task, 4)
        share = uniform[:, :3].median(1).values  # the median of three uniform numbers has the distribution Beta(2, 2)
        return share, (uniform[:, 3] * self.blocks).long().clamp(max=self.blocks - 1)

    def training_step(
        self, model: HeadModel, parameters: Parameters, batch: Batch, statistics: BatchNormStatistics
    ) -> TrainingStep:
        task, labels = batch
        classes = labels.queries
        share, place = self.mixing(task.noise[MIXING])

        def mix(block: int, maps: Tensor) -> Tensor:
            """Mix the images' maps (task, image, ...) with those of their partners, before the block of this place."""
            kept = torch.where(place == block, share, 1.0).to(maps.dtype)[:, None, None, None, None]
            return kept * maps + (1 - kept) * _partners(maps)

        network = single_conv4(model.backbone, self.about.title).network
        maps, _ = network(for_each_task(parameters, task.n_tasks), first_layer_input(task), statistics, mix)
        logits = self.training_logits(parameters, model.features(maps), task)
        mixed = share * cross_entropy(logits, classes) + (1 - share) * cross_entropy(logits, _partners(classes))

        quarter = -(-classes.shape[1] // ROTATIONS)
        pictures = task.images[:, :quarter]
        turned = torch.cat([torch.rot90(pictures, turns, (2, 3)) for turns in range(ROTATIONS)], 1)
        features, seen = model.encode(parameters, replace(task, images=turned), statistics)
        logits, known = self.training_logits(parameters, features, task), classes[:, :quarter].repeat(1, ROTATIONS)
        turns = torch.arange(ROTATIONS, device=task.device).repeat_interleave(quarter).expand_as(known)
        of_classes = cross_entropy(logits, known)
        turn_logits = linear(parameters, "rotations", features)
        of_turns = cross_entropy(turn_logits, turns)

        total = mixed + self.rotation_weight * (of_classes + of_turns)
        losses = {"total": total, "mixed": mixed, "classification": of_classes, "rotation": of_turns}
        return TrainingStep(losses, logits, known, seen)


def _partners(values: Tensor) -> Tensor:
    """The values of each image's partner, (task, image, ...). A batch is in random order, so its neighbour will do."""
    return values.roll(1, 1)
