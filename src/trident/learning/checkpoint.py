"""Checkpoints: one safetensors file with weights, statistics, optimiser state, settings and provenance.

Files are written atomically. All randomness depends on (seed, stream, task index) only, so the step number replaces the
state of random generators.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import trident
from trident.data.store import ImageStore
from trident.distributed.processes import Processes
from trident.errors import TridentError, one_line
from trident.files import write_file
from trident.learning import weights_header
from trident.methods.registry import method_name
from trident.nn.parameters import Parameters
from trident.recipes.files import recipe_names
from trident.recipes.loading import flat_values, load_recipe, method_from, recipe_from, recipe_values
from trident.recipes.recipe import Recipe
from trident.weights import weight_names, weights_file

LAST = "last.safetensors"
BEST = "best.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state
_MOST_CHARACTERS = 200  # of another library's error message that is repeated in ours
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)  # RecursionError is one too
_FORMAT = "trident-checkpoint-2"


class Temperatures(NamedTuple):
    """Labelling divides log-probabilities by these. Fitted on validation tasks."""

    many: float = 1.0  # for many pictures classified together
    few: float = 1.0  # for a few pictures classified together
    alone: float = 1.0  # for single pictures


@dataclass(frozen=True)
class Checkpoint:
    recipe: Recipe
    parameters: Parameters
    running: Parameters
    step: int
    optimizer: Parameters = field(default_factory=dict)  # empty in files that are not for resuming
    best: dict[str, Any] | None = None  # the best validation so far: step, accuracy, ci95, tasks
    provenance: dict[str, Any] = field(default_factory=dict)
    validated_step: int = 0  # the last step whose validation is done
    path: Path | None = None  # the file it was read from
    temperatures: Temperatures = field(default_factory=Temperatures)

    def summary(self) -> dict[str, Any]:
        """Which weights these are, as part of a result's JSON."""
        return {
            "file": str(self.path),
            "recipe": self.recipe.name,
            "step": self.step,
            "trained_on": self.provenance.get("dataset"),
            "steps_before": self.steps_before,
            "trained_on_before": self.trained_on_before,
        }

    @property
    def steps_before(self) -> int:
        """Training steps of the weights that this run started from."""
        start = self.provenance.get("start")
        return int(start["step"]) + int(start.get("steps_before", 0)) if start else 0

    @property
    def all_steps(self) -> int:
        """Training steps of this run, and of the weights that it started from."""
        return self.steps_before + self.step

    @property
    def trained_on_before(self) -> list[str]:
        """Other datasets that the starting weights were trained on: their classes are not new."""
        start = self.provenance.get("start")
        if not start:
            return []
        own = (self.provenance.get("dataset"), self.provenance.get("fingerprint"))
        earlier = (start["trained_on"], start["provenance"].get("fingerprint"))
        return [*start.get("trained_on_before", []), *([] if own == earlier else [str(start["trained_on"])])]

    def describe(self) -> str:
        """Which weights these are, in words."""
        if self.recipe.method.about.trained_on == "nothing":
            return one_line(f"recipe {self.recipe.name}, not trained")
        trained_on = self.provenance.get("dataset") or "unknown data"
        first = f"{' and '.join(self.trained_on_before)}, then on " if self.trained_on_before else ""
        before = f", after {self.steps_before} steps of the run it started from" if self.steps_before else ""
        return one_line(f"recipe {self.recipe.name}, trained on {first}{trained_on} for {self.step} steps{before}")

    def caution(self, store: ImageStore, split: str) -> str:
        """What to say beside accuracy and calibration on the very classes that the best weights were chosen on."""
        own = (self.provenance.get("dataset"), self.provenance.get("fingerprint"))
        if split != "val" or not self.best or (store.dataset != own[0] and store.fingerprint != own[1]):
            return ""
        return "these classes chose the weights; --split test gives the final number"


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    tensors: dict[str, Tensor] = {
        f"{group}/{key}": value.detach().cpu().contiguous()
        for group in ("parameters", "running", "optimizer")
        for key, value in getattr(checkpoint, group).items()
    }
    about = {
        "recipe": recipe_values(checkpoint.recipe),
        **{key: getattr(checkpoint, key) for key in ("step", "best", "provenance", "validated_step")},
        "temperatures": checkpoint.temperatures._asdict(),
    }
    text = json.dumps(about)
    checksum = digest_of(text, {key: value.numpy() for key, value in tensors.items()})
    content = save(tensors, {"format": _FORMAT, "trident": text, "checksum": checksum})
    write_file(path, content)


def digest_of(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over a text and named tensors, for files of weights and classifiers."""
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        value = np.ascontiguousarray(tensors[key])
        digest.update(f"{key} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def untrained(recipe: Recipe) -> Checkpoint:
    """A checkpoint of a method that has nothing to learn."""
    if recipe.method.about.trained_on != "nothing":
        raise TridentError(f"{recipe.name} must be trained first: trident train {recipe.name} --out RUN")
    if recipe.shapes():
        raise TridentError(f"{recipe.name} has a backbone without weights: backbone.name must be frozen")
    return Checkpoint(recipe, {}, {}, 0, provenance={"data": None, "dataset": None, "fingerprint": ""})


def load_checkpoint(path: Path | str) -> Checkpoint:
    """From a file, or from a run's folder: its best weights, or its last ones if there are no best ones yet.

    It may also be the name of included weights, or a recipe, by name or as a TOML file, whose method needs no training.
    """
    path, without_best = Path(path), False
    weights_header.check_run(path)
    if not path.exists() and str(path) in weight_names():
        path = weights_file(str(path))
    if path.suffix == ".toml" or (not path.exists() and str(path) in recipe_names()):
        return untrained(load_recipe(str(path)))
    if path.is_dir():
        if not (path / BEST).is_file() and not (path / LAST).is_file():
            raise TridentError(f"{path} is not a run: it holds neither {BEST} nor {LAST}")
        without_best = not (path / BEST).is_file()
        path = path / (LAST if without_best else BEST)
    metadata, tensors = _content(path)
    try:
        loaded = _checkpoint_from(metadata, tensors, path)
        loaded.summary()  # raises an error if a part of the provenance is missing
    except _DAMAGE as error:
        raise TridentError(f"{path} is damaged: {repr(error)[:_MOST_CHARACTERS]}") from error
    if without_best and loaded.best:
        raise TridentError(
            f"{path.with_name(BEST)} is missing, with the best weights, of step {loaded.best['step']}: 'trident train "
            f"--resume {path.parent}' continues and writes it again at the next validation; {path} has the last weights"
        )
    return loaded


def _checkpoint_from(metadata: dict[str, str], tensors: Parameters, path: Path) -> Checkpoint:
    """The content of a weights file as a checkpoint; every part is checked."""
    arrays = {key: value.numpy() for key, value in tensors.items()}
    if "checksum" in metadata and metadata["checksum"] != digest_of(metadata["trident"], arrays):
        raise ValueError("its content does not match its checksum; copy it again, or make it again")
    about = json.loads(metadata["trident"])
    groups: dict[str, Parameters] = {"parameters": {}, "running": {}, "optimizer": {}}
    for key, value in tensors.items():
        group, _, name = key.partition("/")
        groups[group][name] = value
    recipe = recipe_from(about["recipe"], str(path))
    parameters = recipe.shapes()
    moments = {f"{moment}/{key}": value for moment in MOMENTS for key, value in parameters.items()}
    return Checkpoint(
        recipe,
        _checked_tensors(parameters, groups["parameters"], path),
        _checked_tensors(recipe.running_shapes(), groups["running"], path),
        weights_header.steps(about["step"]),
        _checked_tensors(moments, groups["optimizer"], path) if groups["optimizer"] else {},
        weights_header.best(about["best"]),
        {"data": None, "dataset": recipe.dataset, "fingerprint": ""} | weights_header.provenance(about["provenance"]),
        weights_header.steps(about["validated_step"], "validated step"),
        path,
        Temperatures(**{key: weights_header.temperature(value) for key, value in about["temperatures"].items()}),
    )


def checkpoint_from_first(processes: Processes, make: Callable[[], Checkpoint]) -> Checkpoint:
    """A checkpoint that only the first process makes or reads. The others need not see its files."""
    if processes.alone:
        return make()

    def packed() -> dict[str, object]:
        made = make()
        # Plain values instead of the recipe: its backbone may hold what cannot be sent, such as an open model.
        values = {entry.name: getattr(made, entry.name) for entry in fields(made)}
        return values | {"recipe": recipe_values(made.recipe)}

    values = processes.from_first(packed)
    recipe = recipe_from(values["recipe"], "the first process")  # type: ignore[arg-type]
    return Checkpoint(**values | {"recipe": recipe})  # type: ignore[arg-type]


def check_same_inputs(processes: Processes, recipe: Recipe, store: ImageStore) -> None:
    """Check that all processes run the same programs, on the same data, by the same recipe."""
    if processes.alone:
        return
    processes.check_same({"the version of trident": trident.__version__, "the version of torch": torch.__version__})
    processes.check_same({"the fingerprint of the data": f"{store.fingerprint[:12]} ({store.dataset})"})
    processes.check_same({"the recipe": recipe.name, **flat_values(recipe)})


def recipe_of_weights(name: str) -> Recipe:
    """The recipe of installed weights, without reading the weights."""
    path = weights_file(name)
    return recipe_from(weights_header.read_header(path)[0]["recipe"], str(path))


def _content(path: Path) -> tuple[dict[str, str], Parameters]:
    """The metadata and the tensors of a weights file."""
    try:
        weights_header.check_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Copied, because they are parts of the file: if somebody wrote into it, they would change while in use.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError, *_DAMAGE) as error:
        raise TridentError(f"{path} is damaged or no safetensors file: {str(error)[:_MOST_CHARACTERS]}") from error
    if metadata.get("format") != _FORMAT:
        raise TridentError(f"{path} holds weights of another program, or of another version of trident")
    return metadata, tensors


def with_method(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The weights as those of another method that is trained in the same way: parameters of the same names."""
    if method_name(checkpoint.recipe.method) == name:
        return checkpoint
    classes = checkpoint.recipe.method.n_training_classes
    recipe = replace(checkpoint.recipe, method=method_from(name, {"training_classes": classes} if classes else {}))
    return replace(
        checkpoint,
        recipe=recipe,
        parameters={key: checkpoint.parameters[key] for key in recipe.shapes()},
        running={key: checkpoint.running[key] for key in recipe.running_shapes()},
        temperatures=Temperatures(),  # they were fitted for the first method
    )


def shareable(checkpoint: Checkpoint, half: bool = False) -> Checkpoint:
    """For sharing: without optimiser state and local paths; `half`: in half precision, which takes half the space."""
    recipe = checkpoint.recipe
    if recipe.training.start_from not in (None, *weight_names()):
        recipe = replace(recipe, training=replace(recipe.training, start_from=None))
    if half:
        checkpoint = replace(checkpoint, parameters=_halved(checkpoint.parameters), running=_halved(checkpoint.running))
    return replace(checkpoint, recipe=recipe, optimizer={}, provenance=_without_paths(checkpoint.provenance))


def _halved(parameters: Parameters) -> Parameters:
    """In half precision, where that is precise enough: not for numbers too large or too small for it."""

    def fits(value: Tensor) -> bool:
        return bool(((value.half().float() - value).abs() <= 1e-3 * value.abs() + 1e-6).all())

    return {key: value.half() if fits(value) else value for key, value in parameters.items()}


def _without_paths(provenance: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in provenance.items() if key not in ("data", "start")}
    if "start" in provenance:
        start = {key: value for key, value in provenance["start"].items() if key != "file"}
        kept["start"] = start | {"provenance": _without_paths(start["provenance"])}
    return kept


def _checked_tensors(expected: Parameters, tensors: Parameters, path: Path) -> Parameters:
    """The tensors of a file, if they are those expected, in the model's order. Half precision becomes float32.

    The order matters: it decides the last bit of sums over all parameters.
    """
    tensors = {key: value.float() if value.dtype == torch.float16 else value for key, value in tensors.items()}
    for key in sorted(expected.keys() | tensors.keys()):
        actual, needed = _kind(tensors.get(key)), _kind(expected.get(key))
        if actual != needed:
            raise TridentError(
                f"{path} holds weights of another architecture: '{key}' is {actual}, its settings need {needed}"
            )
    return {key: tensors[key] for key in expected}


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
