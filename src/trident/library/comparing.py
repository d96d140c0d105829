"""Methods and functions of your own, measured on the same few-shot tasks from your features."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trident.data.store import class_table, store_in_memory
from trident.errors import BadValueError
from trident.library.head import OWN, Head, as_rows
from trident.measuring.evaluate import evaluate
from trident.measuring.record import mean_and_interval
from trident.measuring.subject import PredictFunction, TrainedModel
from trident.recipes.plain_values import checked
from trident.settings import EpisodeSpec, Protocol, hints_of

# Features (n_support, feature) of the labelled images, their labels (n_support,) from 0 to n_way - 1, and features
# (n_query, feature) of the queries -> probabilities (n_query, n_way), or labels (n_query,).
Classify = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class MethodComparison:
    """Accuracies on the same tasks. Printed, it is a table with the protocol of its numbers."""

    accuracies: dict[str, np.ndarray]  # in percent, (task,) each
    protocol: str

    def rows(self) -> list[dict[str, Any]]:
        """Accuracy and difference from the first method, paired by task, each with its 95 % interval, in points."""
        first = next(iter(self.accuracies.values()))
        rows = []
        for name, values in self.accuracies.items():
            (mean, ci95), (difference, of_difference) = mean_and_interval(values), mean_and_interval(values - first)
            pair = {"difference": difference, "difference_ci95": of_difference} if values is not first else {}
            rows.append({"name": name, "accuracy": mean, "ci95": ci95, **pair})
        return rows

    def __repr__(self) -> str:
        rows, first = self.rows(), next(iter(self.accuracies))
        width = max(len(name) for name in self.accuracies)
        lines = [f"{'':{width}}  {'accuracy, %':>14}" + (f"  minus {first}" if rows[1:] else "")]
        for row in rows:
            difference = f"{row['difference']:+.2f} ± {row['difference_ci95']:.2f}" if "difference" in row else ""
            accuracy = f"{row['accuracy']:.2f} ± {row['ci95']:.2f}"
            lines.append(f"{row['name']:{width}}  {accuracy:>14}  {difference}".rstrip())
        return "\n".join([*lines, self.protocol])

    def plot(self, axes: Any = None) -> Any:
        """Draw the accuracies with their intervals by matplotlib, and return the axes."""
        from matplotlib import pyplot

        axes = axes or pyplot.subplots(figsize=(6, 1 + 0.35 * len(self.accuracies)))[1]
        rows = self.rows()[::-1]
        names, means, intervals = zip(*((row["name"], row["accuracy"], row["ci95"]) for row in rows), strict=True)
        axes.errorbar(means, names, xerr=intervals, fmt="o", capsize=3)
        axes.set_xlabel("accuracy, %, with its 95 % interval")
        return axes


def compare(
    methods: Any,
    features_by_class: Mapping[Any, Any],
    *,
    n_way: int = 5,
    n_shot: int = 1,
    queries: int = 15,
    tasks: int = 1000,
    balance: str = "balanced",
    seed: int = 0,
    device: str | torch.device | None = None,
) -> MethodComparison:
    """Measure methods on the same tasks, whose queries are shuffled.

    `methods`: a list of names, heads made by `few_shot`, or functions (support, support_labels, queries) ->
    probabilities or labels. `features_by_class`: of each class, (image, feature) or (image, cell, channel).
    `queries`: of each class, or on average with `balance="dirichlet"`, as in piles of unequal classes.
    `device`: where to compute; by default where the features are.
    """
    if not isinstance(features_by_class, Mapping):
        raise BadValueError("features_by_class must be a dict with the features of each class")
    for name, value in {"n_way": n_way, "n_shot": n_shot, "queries": queries, "tasks": tasks, "seed": seed}.items():
        checked(int, value, name)
    by_class = {str(name): as_rows(features) for name, features in features_by_class.items()}
    if len(by_class) < len(features_by_class):
        raise BadValueError("two classes have the same name when written as text")
    if n_way < 2 or len(by_class) < n_way:
        raise BadValueError(f"{n_way}-way tasks need {max(n_way, 2)} classes or more, and {len(by_class)} were given")
    shapes = {tuple(rows.shape[1:]) for rows in by_class.values()}
    if len(shapes) != 1:
        raise BadValueError(f"the features of all classes must have one shape, not {sorted(shapes)}")
    methods = [methods] if isinstance(methods, str | Head) else methods
    if not methods or tasks < 2:
        raise BadValueError("compare at least one method, on at least two tasks: an interval needs them")
    for method in methods:
        if not (isinstance(method, str | Head) or callable(method)) or isinstance(method, type):
            raise BadValueError(f"{method!r} is neither a method's name, nor a head of few_shot, nor a function")
    some = next(iter(by_class.values()))
    images = torch.cat([rows.cpu() for rows in by_class.values()]).flatten(1).numpy()
    table = class_table((name, "test", len(rows)) for name, rows in by_class.items())
    store = replace(store_in_memory(OWN, images, table), features_of=OWN)
    episode = EpisodeSpec(n_way, n_shot, queries)
    protocol = Protocol(balance=checked(hints_of(Protocol)["balance"], balance, "balance"))
    accuracies: dict[str, np.ndarray] = {}
    used: Counter[str] = Counter()
    for method in methods:
        subject: TrainedModel | PredictFunction
        if isinstance(method, str | Head):
            head = Head(method, None, {}) if isinstance(method, str) else method
            subject, name = head.model(some, episode, protocol), head.name
        else:
            name = getattr(method, "__name__", type(method).__name__)
            function = _with_probabilities(method, name, n_way, some.shape[1:])
            subject = PredictFunction(function, episode, protocol)
        used[name] += 1
        result = evaluate(subject, store, split="test", tasks=tasks, seed=seed, device=device or some.device)
        accuracies[name if used[name] == 1 else f"{name} {used[name]}"] = result.predictions.accuracies
    return MethodComparison(
        accuracies,
        f"{episode.describe()} tasks from {len(by_class)} classes, {episode.describe_queries()}, "
        f"{protocol.describe(latents=False, batch_norm=False)}, {tasks} tasks, 95 % intervals, seed {seed}",
    )


def _with_probabilities(function: Classify, name: str, n_way: int, shape: Sequence[int]) -> Classify:
    """The function, with features in their own shape, and labels turned into probabilities."""

    def classify(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> Any:
        output = function(support.reshape(-1, *shape), labels, queries.reshape(-1, *shape))
        output = output.detach().cpu().numpy() if isinstance(output, Tensor) else np.asarray(output)
        if output.ndim == 1:
            if not np.isin(output, np.arange(n_way)).all():
                raise BadValueError(f"{name} must return probabilities, or labels from 0 to {n_way - 1}")
            return np.eye(n_way)[output.astype(int)]
        return output  # checked by `PredictFunction`

    classify.__name__ = name  # in error messages
    return classify
