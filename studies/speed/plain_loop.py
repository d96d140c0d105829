"""A plain TRIDENT: one task at a time, torch's own layers, autograd through the unrolled inner loop.

Most MAML code works like this, also the paper's released code. It is written independently of the library and has two
uses: a baseline for speed, and a check of the library's results. It computes in the data type of its parameters,
normally float32, and never waits for a GPU.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.backbones.conv4 import Conv4Backbone, conv4_of
from trident.errors import TridentError
from trident.methods.trident.settings import TridentSettings
from trident.nn.parameters import Parameters
from trident.recipes.loading import setting_of
from trident.recipes.recipe import Recipe
from trident.tasks.task import Batch


class PlainTask(NamedTuple):
    """One task of a batch, in the layout of torch's layers."""

    images: Tensor  # (image, channel, height, width)
    labels: dict[str, Tensor]  # of the support images and of the queries
    noise: dict[str, Tensor]  # as in `Task`
    rows: dict[str, slice]


@dataclass(frozen=True)
class PlainLoop:
    """The loop for one recipe. `memory_format` is that of images, weights and activations."""

    recipe: Recipe
    memory_format: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        recipe = self.recipe
        if not isinstance(recipe.method, TridentSettings):
            raise TridentError(
                f"the plain loop knows TRIDENT only, not {recipe.method.about.title}: omit it with --no-yardstick"
            )
        covered = {
            "method.inner_optimizer": ("sgd",),
            "protocol.batch_norm": ("transductive",),
            "protocol.latents": ("sample", "mean"),
            "method.attfex": ("positional", "off"),
            "method.refinements": (0,),
            "views.mirrored": (False,),
            "views.corners": (False,),
            "views.shifted": (False,),
            "method.label_reads_semantic": (True,),
            "method.label_learns_to_reconstruct": (True,),
            "method.decorrelation_weight": (0,),
            "method.unlabelled_weight": (0,),
            "method.attfex_residual": (False,),
            "method.classifier_features": ("plain",),
            "method.training_classes": (0,),
            "method.semantic_batch_norm": ("set",),
        }
        for name, known in covered.items():
            found = setting_of(recipe, name)
            if found not in known:
                raise TridentError(
                    f"{name} is '{found}': the plain loop knows {' and '.join(map(str, known))} only; omit it with "
                    "--no-yardstick"
                )

    @property
    def _backbone(self) -> Conv4Backbone:
        return conv4_of(self.recipe.backbone, "the plain loop")

    @property
    def _method(self) -> TridentSettings:
        assert isinstance(self.recipe.method, TridentSettings)
        return self.recipe.method

    def meta_gradient(self, parameters: Parameters, batch: Batch) -> tuple[Parameters, Tensor]:
        """The gradient summed over tasks, and each task's query loss."""
        leaves = {key: value.detach().requires_grad_() for key, value in self._torch_layout(parameters).items()}
        total = {key: torch.zeros_like(value) for key, value in leaves.items()}
        second_order = self._method.inner_order == "second"
        losses = []
        for task in self._each(batch):
            # Copies, so that inner gradients do not flow through a last layer made from prototypes.
            adapted = {key: value.clone() for key, value in leaves.items()} | self._prototypes(leaves, task)
            for step in range(self._method.inner_steps):
                inner = self._loss(adapted, task, "support", step)
                gradients = torch.autograd.grad(
                    inner, list(adapted.values()), create_graph=second_order, materialize_grads=True
                )
                adapted = self._moved(adapted, gradients)
            outer = self._loss(adapted, task, "query", 0)
            gradients = torch.autograd.grad(outer, list(leaves.values()), materialize_grads=True)
            for key, gradient in zip(leaves, gradients, strict=True):
                total[key] += gradient
            losses.append(outer.detach())
        return _library_layout(total), torch.stack(losses)

    def predict(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Log-probabilities of the queries after adaptation: (task, query, n_way)."""
        start = self._torch_layout(parameters)
        predicted = []
        for task in self._each(batch):
            with torch.no_grad():
                adapted = start | self._prototypes(start, task)
            for step in range(self._method.inner_steps):
                leaves = {key: value.detach().requires_grad_() for key, value in adapted.items()}
                inner = self._loss(leaves, task, "support", step)
                gradients = torch.autograd.grad(inner, list(leaves.values()), materialize_grads=True)
                with torch.no_grad():
                    adapted = self._moved(leaves, gradients)
            with torch.no_grad():
                _, z_label, _, _ = self._infer(adapted, task, "query", 0)
                predicted.append(torch.log_softmax(self._classify(adapted, z_label), -1))
        return torch.stack(predicted)

    def _each(self, batch: Batch) -> Iterator[PlainTask]:
        task, labels = batch
        for i in range(task.n_tasks):
            yield PlainTask(
                task.pixels[i].permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format),
                {"support": task.support_labels[i], "query": labels.queries[i]},
                {name: values[i] for name, values in task.noise.items()},
                {"support": task.support, "query": task.queries},
            )

    def _torch_layout(self, parameters: Parameters) -> Parameters:
        """The library's kernels are (height, width, inputs, outputs), torch's (outputs, inputs, height, width)."""
        return {
            key: value.permute(3, 2, 0, 1).contiguous(memory_format=self.memory_format) if value.ndim == 4 else value
            for key, value in parameters.items()
        }

    def _moved(self, parameters: Parameters, gradients: tuple[Tensor, ...]) -> Parameters:
        rate = self._method.inner_rate
        return {
            key: value - rate * gradient for (key, value), gradient in zip(parameters.items(), gradients, strict=True)
        }

    def _loss(self, p: Parameters, task: PlainTask, target: str, draw: int) -> Tensor:
        objective = self._method
        z_semantic, z_label, semantic_kl, label_kl = self._infer(p, task, target, draw)
        pictures = self._decode(p, torch.cat([z_semantic, z_label], 1))
        return (
            objective.classification_weight * F.cross_entropy(self._classify(p, z_label), task.labels[target])
            + objective.reconstruction_weight * ((pictures - task.images[task.rows[target]]) ** 2).sum((1, 2, 3)).mean()
            + objective.label_kl_weight * label_kl
            + objective.semantic_kl_weight * semantic_kl
        )

    def _infer(self, p: Parameters, task: PlainTask, target: str, draw: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z_semantic and z_label of a task's support set or queries, and their mean KL divergences from the prior."""
        rows = task.rows[target]
        semantic, label = (task.noise[f"{target}/{draw}/{latent}"] for latent in ("semantic", "label"))
        style = _flat(self._encode(p, "semantic_encoder", task.images[rows]))
        z_semantic, semantic_kl = self._gaussian(p, "semantic", style, semantic)
        features = self._encode(p, "backbone", task.images)
        masked = features[rows]
        if self._method.attfex == "positional":
            masked = masked * self._attfex(p, features)
        z_label, label_kl = self._gaussian(p, "label", torch.cat([_flat(masked), z_semantic], 1), label)
        return z_semantic, z_label, semantic_kl, label_kl

    def _activate(self, x: Tensor) -> Tensor:
        return F.relu(x) if self._backbone.activation == "relu" else F.leaky_relu(x, 0.2)

    def _encode(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        for block in range(4):
            x = F.max_pool2d(self._activate(_conv(p, f"{name}.{block}", x)), 2)
        return x  # (image, channel, h, w)

    def _attfex(self, p: Parameters, features: Tensor) -> Tensor:
        across = features.transpose(0, 1)  # (channel, image, h, w)
        m = self._activate(F.conv2d(across, p["attfex.w_m.weight"][:, :, None, None]))
        n = self._activate(F.conv2d(m, p["attfex.w_n.weight"][:, :, None, None]))
        maps = [
            F.conv2d(n, p[f"attfex.{part}.weight"][:, :, None, None]).flatten(1) for part in ("query", "key", "value")
        ]
        if self._method.attention_activation:
            maps = [self._activate(x) for x in maps]
        query, key, value = maps  # (channel, h * w)
        scale = 1 / math.sqrt(query.shape[1])
        if self._method.attention_scale == "inside":
            mask = torch.softmax(query @ key.T * scale, -1) @ value
        else:
            mask = torch.softmax(query @ key.T, -1) @ value * scale
        return mask.view(1, *features.shape[1:])

    def _gaussian(self, p: Parameters, name: str, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_var = _linear(p, f"{name}.loc", x), _linear(p, f"{name}.log_var", x)
        bound = self._method.log_var_bound
        if bound is not None:
            log_var = bound * torch.tanh(log_var / bound)
        kl = -0.5 * (1 + log_var - loc**2 - log_var.exp()).sum(1).mean()
        return loc + noise * torch.exp(0.5 * log_var), kl

    def _classify(self, p: Parameters, z_label: Tensor) -> Tensor:
        return _linear(p, "classifier.1", self._activate(_linear(p, "classifier.0", z_label)))

    def _decode(self, p: Parameters, z: Tensor) -> Tensor:
        sizes = [self._backbone.image_size // 2**i for i in (4, 3, 2, 1, 0)]
        x = self._activate(_linear(p, "decoder.linear", z)).view(len(z), sizes[0], sizes[0], -1)
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        for i, size in enumerate(sizes[1:]):
            x = _conv(p, f"decoder.{i}", F.interpolate(x, size=size, mode="nearest"))
            x = torch.sigmoid(x) if i == 3 else self._activate(x)
        return x

    def _prototypes(self, p: Parameters, task: PlainTask) -> Parameters:
        """The classifier's last layer, if it starts from the mean features of the support classes."""
        if self._method.classifier_start == "learned":
            return {}
        _, z_label, _, _ = self._infer(p, task, "support", 0)
        features = self._activate(_linear(p, "classifier.0", z_label))
        members = F.one_hot(task.labels["support"], self.recipe.episode.n_way).to(features)  # (image, n_way)
        means = (members / members.sum(0)).T @ features
        scale = p["classifier.scale"].abs()
        return {"classifier.1.weight": 2 * scale * means, "classifier.1.bias": -scale * (means**2).sum(1)}


def _conv(p: Parameters, name: str, x: Tensor) -> Tensor:
    x = F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], padding=1)
    if f"{name}.norm.gain" in p:
        x = F.batch_norm(x, None, None, p[f"{name}.norm.gain"], p[f"{name}.norm.shift"], training=True)
    return x


def _linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _flat(features: Tensor) -> Tensor:
    return features.permute(0, 2, 3, 1).flatten(1)  # the library's order: pixels, then channels


def _library_layout(parameters: Parameters) -> Parameters:
    return {key: value.permute(2, 3, 1, 0) if value.ndim == 4 else value for key, value in parameters.items()}


@contextmanager
def torch_settings(exact: bool) -> Iterator[None]:
    """Set torch's TF32 switches for the loop. They only affect GPUs.

    For timing, torch's defaults: TF32 in convolutions. With `exact`, for comparing results: full float32.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32)
    cudnn.allow_tf32, matmul.allow_tf32 = not exact, False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
