"""TRIDENT the plain way: task after task, torch's own layers, autograd through the unrolled inner loop.

It is what most MAML code does, written independently of the library, and serves two ends: the benchmarks' yardstick,
and a second opinion on the library's numbers. It covers the paper's network with plain inner steps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trident.adapt import TaskBatch
from trident.nn.parameters import Parameters
from trident.settings import ModelSettings, Recipe


def activate(x: Tensor, s: ModelSettings) -> Tensor:
    return F.relu(x) if s.activation == "relu" else F.leaky_relu(x, 0.2)


def conv(p: Parameters, name: str, x: Tensor) -> Tensor:
    x = F.conv2d(x, p[f"{name}.weight"].permute(3, 2, 0, 1), p[f"{name}.bias"], padding=1)
    if f"{name}.norm.gain" in p:
        x = F.batch_norm(x, None, None, p[f"{name}.norm.gain"], p[f"{name}.norm.shift"], training=True)
    return x


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def encode(p: Parameters, name: str, x: Tensor, s: ModelSettings) -> Tensor:
    for block in range(4):
        x = F.max_pool2d(activate(conv(p, f"{name}.{block}", x), s), 2)
    return x  # (image, channel, h, w)


def flat(features: Tensor) -> Tensor:
    return features.permute(0, 2, 3, 1).flatten(1)  # the library's order of features: pixels, then channels


def attfex(p: Parameters, features: Tensor, s: ModelSettings) -> Tensor:
    across = features.transpose(0, 1)  # (channel, image, h, w)
    m = activate(F.conv2d(across, p["attfex.w_m.weight"][:, :, None, None]), s)
    n = activate(F.conv2d(m, p["attfex.w_n.weight"][:, :, None, None]), s)
    maps = [F.conv2d(n, p[f"attfex.{part}.weight"][:, :, None, None]).flatten(1) for part in ("query", "key", "value")]
    query, key, value = [activate(x, s) if s.attention_activation else x for x in maps]  # (channel, h * w)
    mask = torch.softmax(query @ key.T / math.sqrt(query.shape[1]), -1) @ value
    return mask.view(1, *features.shape[1:])


def gaussian(p: Parameters, name: str, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    loc, log_var = linear(p, f"{name}.loc", x), linear(p, f"{name}.log_var", x)
    kl = -0.5 * (1 + log_var - loc**2 - log_var.exp()).sum(1).mean()
    return loc + noise * torch.exp(0.5 * log_var), kl


def decode(p: Parameters, z: Tensor, s: ModelSettings) -> Tensor:
    sizes = [s.image_size // 2**i for i in (4, 3, 2, 1, 0)]
    x = activate(linear(p, "decoder.linear", z), s).view(len(z), sizes[0], sizes[0], s.channels).permute(0, 3, 1, 2)
    for i, size in enumerate(sizes[1:]):
        x = conv(p, f"decoder.{i}", F.interpolate(x, size=size, mode="nearest"))
        x = torch.sigmoid(x) if i == 3 else activate(x, s)
    return x


def infer(
    p: Parameters, images: Tensor, rows: slice, semantic: Tensor, label: Tensor, s: ModelSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z_semantic and z_label of some images of a task, and their mean divergences from the prior."""
    z_semantic, semantic_kl = gaussian(p, "semantic", flat(encode(p, "semantic_encoder", images[rows], s)), semantic)
    features = encode(p, "label_encoder", images, s)
    masked = features[rows] * attfex(p, features, s)
    z_label, label_kl = gaussian(p, "label", torch.cat([flat(masked), z_semantic], 1), label)
    return z_semantic, z_label, semantic_kl, label_kl


def classify(p: Parameters, z_label: Tensor, s: ModelSettings) -> Tensor:
    return linear(p, "classifier.1", activate(linear(p, "classifier.0", z_label), s))


def loss(
    p: Parameters, images: Tensor, rows: slice, labels: Tensor, semantic: Tensor, label: Tensor, recipe: Recipe
) -> Tensor:
    s, objective = recipe.model, recipe.objective
    z_semantic, z_label, semantic_kl, label_kl = infer(p, images, rows, semantic, label, s)
    pictures = decode(p, torch.cat([z_semantic, z_label], 1), s)
    return (
        objective.classification_weight * F.cross_entropy(classify(p, z_label, s), labels)
        + objective.reconstruction_weight * ((pictures - images[rows]) ** 2).sum((1, 2, 3)).mean()
        + objective.label_kl_weight * label_kl
        + objective.semantic_kl_weight * semantic_kl
    )


def prototypes(
    p: Parameters, images: Tensor, n: int, labels: Tensor, semantic: Tensor, label: Tensor, s: ModelSettings
) -> Parameters:
    """The classifier's last layer, where a task starts from the mean features of its support classes."""
    _, z_label, _, _ = infer(p, images, slice(n), semantic, label, s)
    features = activate(linear(p, "classifier.0", z_label), s)
    means = torch.stack([features[labels == way].mean(0) for way in range(int(labels.max()) + 1)])
    scale = p["classifier.scale"]
    return {"classifier.1.weight": 2 * scale * means, "classifier.1.bias": -scale * (means**2).sum(1)}


def plain_predict(parameters: Parameters, tasks: TaskBatch, recipe: Recipe) -> Tensor:
    """Log-probabilities of the queries after adaptation, task after task: (task, query, n_way)."""
    s, n = recipe.model, tasks.images.n_support
    predicted = []
    for task in range(tasks.n_tasks):
        images = tasks.images.pixels[task].permute(0, 3, 1, 2)
        labels = tasks.support_labels[task]
        adapted = parameters
        if s.classifier_start == "prototypes":
            noise = tasks.support_noise[0]
            with torch.no_grad():
                adapted = parameters | prototypes(
                    parameters, images, n, labels, noise.semantic[task], noise.label[task], s
                )
        for step in range(recipe.adaptation.steps):
            leaves = {key: value.detach().requires_grad_() for key, value in adapted.items()}
            noise = tasks.support_noise[step]
            inner = loss(leaves, images, slice(n), labels, noise.semantic[task], noise.label[task], recipe)
            gradients = torch.autograd.grad(inner, list(leaves.values()), materialize_grads=True)
            adapted = {
                key: value.detach() - recipe.adaptation.rate * gradient
                for (key, value), gradient in zip(leaves.items(), gradients, strict=True)
            }
        with torch.no_grad():
            noise = tasks.query_noise[0]
            _, z_label, _, _ = infer(adapted, images, slice(n, None), noise.semantic[task], noise.label[task], s)
            predicted.append(torch.log_softmax(classify(adapted, z_label, s), -1))
    return torch.stack(predicted)


def plain_meta_gradient(parameters: Parameters, tasks: TaskBatch, recipe: Recipe) -> tuple[Parameters, Tensor]:
    """The gradient summed over tasks, and each task's query loss."""
    leaves = {key: value.detach().requires_grad_() for key, value in parameters.items()}
    total = {key: torch.zeros_like(value) for key, value in leaves.items()}
    losses = []
    n = tasks.images.n_support
    for task in range(tasks.n_tasks):
        images = tasks.images.pixels[task].permute(0, 3, 1, 2)
        adapted = leaves
        for step in range(recipe.adaptation.steps):
            noise = tasks.support_noise[step]
            labels = tasks.support_labels[task]
            inner = loss(adapted, images, slice(n), labels, noise.semantic[task], noise.label[task], recipe)
            gradients = torch.autograd.grad(inner, list(adapted.values()), create_graph=True)
            adapted = {
                key: value - recipe.adaptation.rate * gradient
                for (key, value), gradient in zip(adapted.items(), gradients, strict=True)
            }
        noise = tasks.query_noise[0]
        labels = tasks.query_labels[task]
        outer = loss(adapted, images, slice(n, None), labels, noise.semantic[task], noise.label[task], recipe)
        for key, gradient in zip(leaves, torch.autograd.grad(outer, list(leaves.values())), strict=True):
            total[key] += gradient
        losses.append(outer.detach())
    return total, torch.stack(losses)
