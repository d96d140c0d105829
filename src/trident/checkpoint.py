"""Checkpoints: one safetensors file with weights, statistics, optimiser state, settings and provenance.

A file is there whole or not at all. All randomness is drawn from (seed, stream, task index), so the step number is the
whole state of the random generators.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trident.errors import TridentError
from trident.files import atomic_file
from trident.model import Trident
from trident.nn.parameters import Parameters
from trident.recipes import recipe_from, recipe_values
from trident.settings import Recipe

LAST = "last.safetensors"
BEST = "best.safetensors"
_FORMAT = "trident-checkpoint-1"


@dataclass(frozen=True)
class Checkpoint:
    recipe: Recipe
    parameters: Parameters
    running: Parameters
    step: int
    optimizer: Parameters = field(default_factory=dict)  # empty in files meant for use, not for resuming
    best: dict[str, Any] | None = None  # the best validation so far: step, accuracy, ci95, tasks
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Trident:
        return Trident(self.recipe.model, self.recipe.episode)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    groups = {"parameters": checkpoint.parameters, "running": checkpoint.running, "optimizer": checkpoint.optimizer}
    tensors: dict[str, Tensor] = {
        f"{group}/{key}": value.detach().cpu().contiguous()
        for group, part in groups.items()
        for key, value in part.items()
    }
    about = {
        "recipe": recipe_values(checkpoint.recipe),
        "step": checkpoint.step,
        "best": checkpoint.best,
        "provenance": checkpoint.provenance,
    }
    content = save(tensors, {"format": _FORMAT, "trident": json.dumps(about)})
    with atomic_file(path) as file:
        file.write(content)


def load_checkpoint(path: Path) -> Checkpoint:
    """From a file, or from a run's folder: its best weights, or its last ones if there are no best ones yet."""
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (BEST, LAST) if (path / name).is_file()]
        if not found:
            raise TridentError(f"{path} is not a run: it holds neither {BEST} nor {LAST}")
        path = found[0]
    if not path.is_file():
        raise TridentError(f"there is no run or weights file at {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise TridentError(f"{path} is not a safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise TridentError(f"{path} holds weights of another program: it was not written by trident")
    about = json.loads(metadata["trident"])
    groups: dict[str, Parameters] = {"parameters": {}, "running": {}, "optimizer": {}}
    for key, value in tensors.items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    recipe = recipe_from(about["recipe"], str(path))
    model = Trident(recipe.model, recipe.episode)
    return Checkpoint(
        recipe,
        _as_in(model.initial(0), groups["parameters"], path),
        _as_in(model.initial_running(), groups["running"], path),
        about["step"],
        groups["optimizer"],
        about["best"],
        about["provenance"],
    )


def _as_in(expected: Parameters, found: Parameters, path: Path) -> Parameters:
    """The tensors in the model's own order, on which the last bit of a sum over them depends."""
    for key in sorted(expected.keys() | found.keys()):
        shapes = [tuple(group[key].shape) if key in group else "missing" for group in (found, expected)]
        if shapes[0] != shapes[1]:
            raise TridentError(
                f"{path} holds weights of another architecture: '{key}' is {shapes[0]}, its settings need {shapes[1]}"
            )
    return {key: found[key] for key in expected}
