"""The learner of S2M2: it rotates training pictures, and mixes feature maps inside the backbone (manifold mixup)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trident.backbones.conv4 import first_layer_input, single_conv4
from trident.engines.learner import accuracy_of
from trident.engines.plain.heads import HeadLearner, TrainingStep
from trident.methods.base import cross_entropy
from trident.methods.metric.s2m2 import MIXING, ROTATIONS, S2M2
from trident.nn.parameters import Parameters, for_each_task
from trident.tasks.task import Batch, Task


@dataclass(frozen=True)
class ManifoldMixupLearner(HeadLearner):
    @property
    def method(self) -> S2M2:
        assert isinstance(self.model.method, S2M2)
        return self.model.method

    def training_step(self, parameters: Parameters, batch: Batch) -> TrainingStep:
        task, labels = batch
        method, classes = self.method, labels.queries
        share, place = method.mixing(task.noise[MIXING])

        features = self._mixed_features(parameters, task, share, place)
        logits = method.training_logits(parameters, features, task)
        mixed = share * cross_entropy(logits, classes) + (1 - share) * cross_entropy(logits, _partners(classes))

        quarter = -(-classes.shape[1] // ROTATIONS)
        pictures = task.images[:, :quarter]
        turned = torch.cat([torch.rot90(pictures, turns, (2, 3)) for turns in range(ROTATIONS)], 1)
        features, seen = self.features(parameters, replace(task, images=turned))
        logits, known = method.training_logits(parameters, features, task), classes[:, :quarter].repeat(1, ROTATIONS)
        turns = torch.arange(ROTATIONS, device=task.device).repeat_interleave(quarter).expand_as(known)
        of_classes = cross_entropy(logits, known)
        of_turns = cross_entropy(method.rotation_logits(parameters, features), turns)

        total = mixed + method.rotation_weight * (of_classes + of_turns)
        losses = {"total": total, "mixed": mixed, "classification": of_classes, "rotation": of_turns}
        return TrainingStep(losses, accuracy_of(logits, known), seen)

    def _mixed_features(self, parameters: Parameters, task: Task, share: Tensor, place: Tensor) -> Tensor:
        """Features of all images, each mixed with another before the block of this place: (task, image, feature)."""

        def mix(block: int, maps: Tensor) -> Tensor:
            kept = torch.where(place == block, share, 1.0).to(maps.dtype)[:, None, None, None, None]
            return kept * maps + (1 - kept) * _partners(maps)

        network = single_conv4(self.model.backbone, self.method.about.title).network
        own = for_each_task(parameters, task.n_tasks)
        maps, _ = network(own, first_layer_input(task), self.statistics(task), mix)
        return self.model.features(maps)


def _partners(values: Tensor) -> Tensor:
    """The values of each image's partner, (task, image, ...). A batch is in random order, so its neighbour will do."""
    return values.roll(1, 1)
