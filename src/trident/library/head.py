"""A method as a classifier of features, with `fit` and `predict_proba` as in scikit-learn."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trident.backbones.frozen import FrozenBackbone
from trident.engines.execution import Execution
from trident.errors import BadValueError, NotFiniteError, TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint
from trident.measuring.subject import TrainedModel
from trident.methods.base import HeadOnFeatures, Method
from trident.methods.registry import METHODS, method_class, method_name
from trident.nn.parameters import on_device
from trident.recipes.loading import after_training, method_from, recipe_values
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol, Views, require
from trident.tasks.task import Task

OWN = "own features"  # where a recipe names the network that computed them


class Head:
    """A method on features (image, feature), or on feature maps (image, cell, channel): arrays, tensors or lists.

    Features are float32, as everywhere in trident. Results have the type and the device of the queries. A transductive
    method classifies all queries of a call together, so each of its predictions depends on the other queries.
    """

    classes_: np.ndarray  # all labels, sorted

    def __init__(self, method: str, weights: str | Path | None, settings: dict[str, Any]):
        require("name" not in settings, "'name' is not a setting: give the method's name first")
        changed = ", ".join(f"{key}={value}" for key, value in settings.items())
        self.name = f"{method}({changed})" if settings else method
        if not issubclass(method_class(method), HeadOnFeatures):
            raise TridentError(f"{method} trains a whole network, so features are not enough: use 'trident train'")
        self._trained: Checkpoint | None = None
        if weights is None:
            self.method = method_from(method, settings)
            if _needs_weights(self.method):
                raise TridentError(
                    f"{method} has to be trained: give weights=..., a run or a name that 'trident weights' lists"
                )
        else:
            self._trained = load_checkpoint(weights)
            self.method = _changed(self._trained.recipe, method, settings, weights)

    def __repr__(self) -> str:
        return f"few_shot({self.name})"

    def fit(self, features: Any, labels: Any) -> Self:
        """Take the labelled images. Labels may be anything that can be sorted: texts, numbers."""
        support, given = as_rows(features), labels.detach().cpu() if isinstance(labels, Tensor) else labels
        try:
            values = np.asarray(given)
            if values.dtype.kind == "U" and not all(isinstance(label, str) for label in given):
                raise TypeError("some labels are texts and some are not")
            classes, indices = np.unique(values, return_inverse=True)
        except (TypeError, ValueError) as error:
            raise BadValueError(f"the labels cannot be sorted: {error}") from error
        if len(support) == 0 or indices.shape != (len(support),):
            raise BadValueError(f"{len(support)} images came with {indices.size} labels: give one for each image")
        if len(classes) < 2 or (classes.dtype.kind == "f" and not np.isfinite(classes).all()):
            raise BadValueError(f"labels of at least two classes are needed, not {classes.tolist()}")
        order = np.argsort(indices, kind="stable")  # sorted by class, as in all tasks
        self._support, self._labels = support[torch.from_numpy(order).to(support.device)], indices[order]
        self.classes_, self._tensor_labels = classes, isinstance(labels, Tensor)  # set only if nothing failed
        return self

    def predict_proba(self, queries: Any) -> Any:
        """The probability of each class, in the order of `classes_`: (query, class)."""
        probabilities = self._probabilities(queries)
        return probabilities if isinstance(queries, Tensor) else probabilities.cpu().numpy()

    def predict(self, queries: Any) -> Any:
        """The most probable label of each query."""
        best = self._probabilities(queries).argmax(1)
        if isinstance(queries, Tensor) and self._tensor_labels:
            return torch.from_numpy(self.classes_).to(best.device)[best]
        return self.classes_[best.cpu().numpy()]

    def _probabilities(self, queries: Any) -> Tensor:
        if not hasattr(self, "classes_"):
            raise TridentError("there are no labelled images yet: call fit first")
        rows = as_rows(queries)
        n_way, device = len(self.classes_), rows.device
        if rows.shape[1:] != self._support.shape[1:]:
            wanted, given = tuple(self._support.shape[1:]), tuple(rows.shape[1:])
            raise BadValueError(f"the queries have features of shape {given}, the labelled images {wanted}")
        if not len(rows):
            return rows.new_zeros(0, n_way)
        n_shot, n_query = int(np.bincount(self._labels).max()), -(-len(rows) // n_way)
        episode = EpisodeSpec(n_way, n_shot, n_query)
        model = self.model(rows, episode, Protocol())
        images = torch.cat([self._support.to(device), rows]).flatten(1)[None]
        task = Task(images, torch.from_numpy(self._labels)[None].to(device), n_way)  # no noise: the means of latents
        learner = model.learner(Execution(str(device)))
        probabilities = learner.log_probabilities(on_device(model.parameters, device), task)[0].exp()
        if not probabilities.isfinite().all():
            raise NotFiniteError(f"{self.name} gives probabilities that are not finite: are the features very large?")
        return probabilities

    def model(self, rows: Tensor, episode: EpisodeSpec, protocol: Protocol) -> TrainedModel:
        """The method for features like these, in tasks of this shape."""
        size, n_cells = rows[0].numel(), rows.shape[1] if rows.dim() == 3 else 1
        if self._trained is not None:
            backbone = self._trained.recipe.backbone
            wanted = (backbone.n_cells, backbone.n_features // backbone.n_cells)
            if tuple(rows.shape[1:]) not in (wanted, (backbone.n_features,)):
                raise BadValueError(
                    f"the weights of {self.name} take features of shape {wanted} or {(backbone.n_features,)}, not "
                    f"{tuple(rows.shape[1:])}"
                )
            n_cells = backbone.n_cells
        own = FrozenBackbone(OWN, size, n_cells)
        recipe = Recipe(self.name, "", OWN, episode, protocol, Views(), own, self.method)
        if self._trained is None:
            return TrainedModel(recipe, recipe.initial(0), recipe.model.initial_running())
        self.method.check_episode(self._trained.recipe.episode, episode)
        computed = backbone.initial(torch.Generator()).keys() | backbone.initial_running().keys()  # by their network
        kept = [
            {key: value for key, value in part.items() if key not in computed}
            for part in (self._trained.parameters, self._trained.running)
        ]
        return TrainedModel(recipe, *kept)


def ready_methods() -> list[str]:
    """The methods that need no trained weights: those that `few_shot(NAME)` takes as it is."""
    kinds = {name: method_class(name) for name in METHODS}
    return [name for name, kind in kinds.items() if issubclass(kind, HeadOnFeatures) and not _needs_weights(kind())]


def as_rows(features: Any) -> Tensor:
    """Features (image, feature) or (image, cell, channel) as a float32 tensor, where they are."""
    if not isinstance(features, Tensor):
        try:
            with np.errstate(over="ignore"):  # an error below
                features = torch.from_numpy(np.array(features, np.float32))
        except (TypeError, ValueError) as error:
            raise BadValueError(f"features must be numbers, equally many for each image: {error}") from error
    if features.is_complex():
        raise BadValueError("features must be real numbers")
    rows: Tensor = features.detach().float()
    if rows.dim() not in (2, 3) or 0 in rows.shape[1:]:
        raise BadValueError(f"features are (image, feature) or (image, cell, channel), not {tuple(rows.shape)}")
    if not rows.isfinite().all():
        raise BadValueError("some features are NaN or infinite")
    return rows


def _needs_weights(method: Method) -> bool:
    """Whether its head has layers to train. A single number, as ProtoNet's scale, has a sensible start.

    The classifier of all training classes, by which some methods train their features, is not used with new classes.
    """
    start = method.model(FrozenBackbone(OWN, 16), EpisodeSpec()).initial(torch.Generator())
    return method.about.trained_on == "episodes" and any(value.dim() for value in start.values())


def _changed(recipe: Recipe, method: str, settings: dict[str, Any], weights: str | Path) -> Method:
    """The method of trained weights with other settings, of those that may be changed after training."""
    if method_name(recipe.method) != method:
        raise TridentError(f"{weights} has weights of {method_name(recipe.method)}, not of {method}")
    fixed = [key for key in settings if f"method.{key}" not in after_training(recipe)]
    if fixed:
        raise TridentError(f"{fixed[0]} cannot be changed for the trained weights {weights}")
    own = {key: value for key, value in recipe_values(recipe)["method"].items() if key != "name"}
    return method_from(method, own | settings)
