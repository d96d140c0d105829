"""What adapted weights say of the queries of a task: of all together, or of each on its own."""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from trident.engines.execution import AnyLearner
from trident.engines.workers import side_by_side
from trident.learning.inner_loop import Learner, TaskBatch, for_each_task
from trident.methods.protonet import ProtoNetLearner
from trident.methods.trident.network import Encodings, Noise, TaskImages
from trident.nn.parameters import Parameters
from trident.settings import Views
from trident.tasks.views import views_of

AS_IT_IS = Views()


def predict(learner: AnyLearner, parameters: Parameters, tasks: TaskBatch, views: Views = AS_IT_IS) -> Tensor:
    """Log-probabilities of the queries' classes after adaptation: (task, query, n_way).

    Of the mean probability, where there are several draws of noise, or `views` asks for more than the images.
    """
    return _over(views, tasks, lambda tasks, view: _mean(learner.logits(parameters, tasks)))


def predict_one_by_one(
    learner: AnyLearner,
    parameters: Parameters,
    tasks: TaskBatch,
    at_once: int,
    views: Views = AS_IT_IS,
    support: Sequence[Encodings] | None = None,
) -> Tensor:
    """The same, but each query is the only one of its task.

    `support` is what `encode_support` made of the support set, of one task, where that is known already.
    """
    if isinstance(learner, ProtoNetLearner) and learner.batch_norm == "running":
        return predict(learner, parameters, tasks, views)  # no query knows of another there

    if support is None:
        return _over(views, tasks, lambda tasks, view: _one_by_one(learner, parameters, tasks, at_once, None))
    # Of the support images nothing is needed any more: no view is made of them.
    images = TaskImages(tasks.images.stored[:, tasks.images.n_support :], tasks.support_labels)
    queries = tasks._replace(images=images)
    assert tasks.n_tasks == 1
    return _over(views, queries, lambda part, view: _one_by_one(learner, parameters, part, at_once, support[view]))


def encode_support(
    learner: AnyLearner, parameters: Parameters, images: TaskImages, views: Views = AS_IT_IS
) -> list[Encodings] | None:
    """The encodings of one task's support images in each view; None where they depend on the queries."""
    if not _encodings_suffice(learner):
        return None
    own = {key: value[None] for key, value in parameters.items()}
    shown = views_of(images.stored[:, : images.n_support], views)
    return [learner.encode(own, TaskImages(support, images.support_labels)) for support in shown]


def _encodings_suffice(learner: AnyLearner) -> TypeGuard[Learner]:
    """Whether a query alone needs nothing but the encodings; a positional AttFEX wants fillers in other places."""
    return isinstance(learner, Learner) and learner.encodes_each_alone and not learner.model.settings.positional


def _one_by_one(
    learner: AnyLearner, parameters: Parameters, tasks: TaskBatch, at_once: int, support: Encodings | None
) -> Tensor:
    n_queries = tasks.query_labels.shape[1]
    found = []
    for task in range(tasks.n_tasks):
        say = _on_its_own(learner, parameters, tasks, task, support)
        parts = [range(n_queries)[start : start + at_once] for start in range(0, n_queries, at_once)]
        found.append(torch.cat(list(side_by_side(say, parts, tasks.query_labels.device))))
    return torch.stack(found)


def _over(views: Views, tasks: TaskBatch, predict: Callable[[TaskBatch, int], Tensor]) -> Tensor:
    """The log of the mean probability over views of the tasks' images, which are numbered."""
    if views == AS_IT_IS:
        return predict(tasks, 0)
    shown = (TaskImages(images, tasks.support_labels) for images in views_of(tasks.images.stored, views))
    return _log_mean([predict(tasks._replace(images=images), view) for view, images in enumerate(shown)])


def _log_mean(logs: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(logs), 0) - math.log(len(logs))


def _mean(draws: list[Tensor]) -> Tensor:
    """Logits of each draw -> log-probabilities of their mean."""
    logs = [torch.log_softmax(logits, -1) for logits in draws]
    return _log_mean(logs) if len(logs) > 1 else logs[0]


def _on_its_own(
    learner: AnyLearner, parameters: Parameters, tasks: TaskBatch, task: int, support: Encodings | None
) -> Callable[[Sequence[int]], Tensor]:
    """What says of some queries of a task, each looked at alone, which classes they are of: (query, n_way).

    Where the support set's encodings are given, the tasks' images are the queries alone.
    """
    if not _encodings_suffice(learner):
        fill = learner.model.settings.positional
        return lambda queries: predict(learner, parameters, alone(tasks, task, queries, fill))[:, 0]
    images = TaskImages(tasks.images.stored[task : task + 1], tasks.support_labels[task : task + 1])
    label, semantic = learner.encode({key: value[None] for key, value in parameters.items()}, images)
    assert semantic is not None  # because no other image matters to it
    if support is not None:
        assert support.semantic is not None
        label, semantic = torch.cat([support.label, label], 1), torch.cat([support.semantic, semantic], 1)

    # The labels and the noise are all that is still needed: no query has to bring the labelled images along.
    pixels = tasks.images.stored.new_zeros(tasks.n_tasks, label.shape[1], 1, 1, 1)
    bare = tasks._replace(images=TaskImages(pixels, tasks.support_labels))

    def from_encodings(queries: Sequence[int]) -> Tensor:
        part = alone(bare, task, queries)
        rows = rows_alone(images.n_support, queries)
        encodings = Encodings(label[0, rows], semantic[0, rows])
        return _mean(learner.logits_from(for_each_task(parameters, part), part, encodings))[:, 0]

    return from_encodings


def rows_alone(n_support: int, queries: Sequence[int]) -> Tensor:
    """Places among a task's images of the support set and, after it, of one query: (query, n_support + 1)."""
    support = torch.arange(n_support).expand(len(queries), -1)
    return torch.cat([support, n_support + torch.tensor(list(queries))[:, None]], 1)


def alone(tasks: TaskBatch, task: int, queries: Sequence[int], fill: bool = False) -> TaskBatch:
    """Some queries of one task, each as a task of its own: the whole support set and that query, first of its set.

    A positional AttFEX needs all its places taken; `fill` puts copies of the support images into those of the other
    queries.
    """
    n_support, n_queries = tasks.images.n_support, tasks.query_labels.shape[1]
    n_fillers = n_queries - 1 if fill else 0
    fillers = torch.arange(n_fillers) % n_support
    rows = torch.cat([rows_alone(n_support, queries), fillers.expand(len(queries), -1)], 1)

    def of_support(noise: Tensor) -> Tensor:
        return noise[task].expand(len(queries), -1, -1)

    def of_query(noise: Tensor) -> Tensor:
        own = noise[task, list(queries)][:, None]  # (query, 1, latent)
        return torch.cat([own, own.new_zeros(len(queries), n_fillers, own.shape[2])], 1)

    images = TaskImages(tasks.images.stored[task][rows], tasks.support_labels[task].expand(len(queries), -1))
    labels = tasks.query_labels[task, list(queries)]
    return TaskBatch(
        images,
        labels[:, None].expand(-1, 1 + n_fillers),
        tuple(Noise(*map(of_support, noise)) for noise in tasks.support_noise),
        tuple(Noise(*map(of_query, noise)) for noise in tasks.query_noise),
    )
