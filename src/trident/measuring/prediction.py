"""Predictions for the queries of a task: all together or each alone, from one view or several."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from trident.engines.learner import AdaptsOnce, Encodes, Learner
from trident.engines.workers import parallel_map
from trident.methods.inner_loop.base import Encodings
from trident.nn.parameters import Parameters
from trident.nn.probabilities import log_mean
from trident.settings import Views
from trident.tasks.task import Task, queries_alone, rows_alone
from trident.tasks.views import views_of

ONE_VIEW = Views()


def predict(learner: Learner, parameters: Parameters, task: Task, views: Views = ONE_VIEW) -> Tensor:
    """Log-probabilities (task, query, n_way), from the mean over views of probabilities or of features."""
    return _averaged_over(views, task, lambda shown, view: _together(learner, parameters, shown, views))


def predict_one_by_one(
    learner: Learner,
    parameters: Parameters,
    task: Task,
    at_once: int,
    views: Views = ONE_VIEW,
    support: Sequence[Encodings] | None = None,
) -> Tensor:
    """Like `predict`, but each query alone, `at_once` at a time. With `support`, a task has images of queries only."""

    def alone(shown: Task, view: int) -> Tensor:
        known = None if support is None else support[view]
        each = [_one_by_one(learner, parameters, shown, i, at_once, views, known) for i in range(task.n_tasks)]
        return torch.stack(each)

    return _averaged_over(views, task, alone)


def encode_support(
    learner: Learner, parameters: Parameters, task: Task, views: Views = ONE_VIEW
) -> list[Encodings] | None:
    """The encodings of one task's support images in each view, or averaged; None where they depend on the queries."""
    if not (isinstance(learner, Encodes) and learner.encodes_alone):
        return None
    support = task.images[:, task.support]
    shown = [support] if views.average == "features" else views_of(support, views)
    return [_encoded(learner, parameters, task.with_images(images), views) for images in shown]


def chunks_of(number: int, at_once: int) -> list[range]:
    return [range(start, min(start + at_once, number)) for start in range(0, number, at_once)]


def _averaged_over(views: Views, task: Task, predict: Callable[[Task, int], Tensor]) -> Tensor:
    """The log of the mean probability over views. A `predict` that averages features gets the task as it is."""
    if views.number == 1 or views.average == "features":
        return predict(task, 0)
    shown = views_of(task.images, views)
    return log_mean([predict(task.with_images(images), view) for view, images in enumerate(shown)])


def _together(learner: Learner, parameters: Parameters, task: Task, views: Views) -> Tensor:
    if views.average == "probabilities":
        return learner.log_probabilities(parameters, task)
    encodes = cast(Encodes, learner)  # a recipe has this average only for methods whose learners do
    return encodes.log_probabilities_from(parameters, task, _encoded(encodes, parameters, task, views))


def _encoded(learner: Encodes, parameters: Parameters, task: Task, views: Views) -> Encodings:
    """Encodings of the task's images: averaged over the views, or of the one view that the task is in."""
    if views.average == "probabilities":
        return learner.encode(parameters, task)
    of_views = [learner.encode(parameters, task.with_images(images)) for images in views_of(task.images, views)]
    return {name: torch.stack([one[name] for one in of_views]).mean(0) for name in of_views[0]}


def _one_by_one(
    learner: Learner,
    parameters: Parameters,
    task: Task,
    index: int,
    at_once: int,
    views: Views,
    support: Encodings | None,
) -> Tensor:
    """Log-probabilities of each query of one task: (query, n_way)."""
    n_queries = task.n_queries
    if isinstance(learner, Encodes) and learner.encodes_alone:
        classify, n_queries = _from_encodings(learner, parameters, task, index, views, support)
    elif isinstance(learner, AdaptsOnce) and learner.adapts_once:
        adapted = learner.adapted(parameters, queries_alone(task, index, [0]))

        def classify(queries: Sequence[int]) -> Tensor:
            own = {key: value.expand(len(queries), *value.shape[1:]) for key, value in adapted.items()}
            return learner.log_probabilities_adapted(own, queries_alone(task, index, queries))[:, 0]
    else:
        fill = learner.model.method.positional

        def classify(queries: Sequence[int]) -> Tensor:
            return _together(learner, parameters, queries_alone(task, index, queries, fill), views)[:, 0]

    return torch.cat(list(parallel_map(classify, chunks_of(n_queries, at_once), task.device)))


def _from_encodings(
    learner: Encodes, parameters: Parameters, task: Task, index: int, views: Views, support: Encodings | None
) -> tuple[Callable[[Sequence[int]], Tensor], int]:
    """A function that classifies single queries from cached encodings, and the number of queries."""
    n_support, images = task.n_support, task.images[index : index + 1]
    labels = task.support_labels[index : index + 1]
    encodings = _encoded(learner, parameters, Task(images, labels, task.n_way), views)
    if support is not None:
        encodings = {name: torch.cat([support[name], queries], 1) for name, queries in encodings.items()}
    n_images = next(iter(encodings.values())).shape[1]
    # Only the labels and the noise are still needed, not the support images.
    noise = {name: values[index : index + 1] for name, values in task.noise.items()}
    bare = Task(images.new_zeros(1, n_images, 1, 1, 1), labels, task.n_way, noise)

    def classify(queries: Sequence[int]) -> Tensor:
        rows = rows_alone(n_support, queries)
        own = {name: values[0, rows] for name, values in encodings.items()}
        return learner.log_probabilities_from(parameters, queries_alone(bare, 0, queries), own)[:, 0]

    return classify, n_images - n_support
