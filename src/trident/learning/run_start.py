"""Starts or resumes a run: checks, the run's folder and its first checkpoint.

A recipe with `training.start_from = "recipe:NAME"` has stages: it starts from the weights that recipe NAME makes. The
first stage is an ordinary run in the folder `start` of the run, and may have a first stage of its own.
"""

import platform
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import trident
from trident.backbones.frozen import FrozenBackbone
from trident.data.store import ImageStore
from trident.engines.execution import device_name, execution_for
from trident.errors import TridentError
from trident.learning.checkpoint import BEST, LAST, Checkpoint, load_checkpoint, save_checkpoint
from trident.learning.run_lock import run_lock
from trident.learning.run_log import LOG
from trident.nn.parameters import Parameters
from trident.recipes.loading import load_recipe
from trident.recipes.recipe import Recipe
from trident.tasks.episodes import EpisodeSampler

STAGE_PREFIX = "recipe:"
STAGE_FOLDER = "start"
_MOST_STAGES = 10


def first_stage(recipe: Recipe) -> Recipe | None:
    """The recipe to be trained first, if there is one."""
    start = recipe.training.start_from
    return load_recipe(start.removeprefix(STAGE_PREFIX)) if start and start.startswith(STAGE_PREFIX) else None


def stages_of(recipe: Recipe, out: Path) -> list[tuple[Recipe, Path]]:
    """All stages with their folders, the first one first; the last one is the recipe itself."""
    stages = [(recipe, out)]
    while (before := first_stage(stages[0][0])) is not None:
        if len(stages) == _MOST_STAGES:
            raise TridentError(f"{recipe.name} has more than {_MOST_STAGES} stages: one starts from itself")
        stages.insert(0, (before, stages[0][1] / STAGE_FOLDER))
    return stages


def check_run(recipe: Recipe, store: ImageStore) -> None:
    """Check that the recipe can be trained on these data."""
    about, training = recipe.method.about, recipe.in_training()
    if about.trained_on == "nothing":
        how = f"measure it with 'trident evaluate {recipe.name} --data STORE'"
        raise TridentError(f"{about.title} needs no training: {how}")
    if recipe.protocol.queries_at_once == "one":
        raise TridentError("protocol.queries_at_once is 'one': it is for evaluation only; train with 'all'")
    if about.trained_on == "classes" and recipe.protocol.batch_norm == "support":
        raise TridentError("protocol.batch_norm is 'support': single images have no support set; train with 'running'")
    recipe.backbone.check_store(store)
    recipe.method.check_training(recipe.backbone)
    expected, stored = recipe.method.n_training_classes, len(store.classes_of("train"))
    if expected not in (0, stored):
        raise TridentError(f"method.training_classes is {expected}, but {store.dataset} has {stored} training classes")
    EpisodeSampler(store, "val", recipe.episode, recipe.protocol)
    if about.trained_on == "episodes":
        try:
            recipe.method.check_episode(recipe.episode, training.episode)
        except TridentError as error:
            raise TridentError(f"training tasks are {training.episode.describe()}, but {error}") from error
        EpisodeSampler(store, "train", training.episode, recipe.protocol)


def start_run(
    recipe: Recipe,
    store: ImageStore,
    data: str,
    out: Path,
    device: str,
    engine: str = "auto",
    precision: str = "auto",
    start_from: Checkpoint | None = None,
) -> Checkpoint:
    """Check everything, then make the run's folder with its first checkpoint. `data` is how to find the store again.

    `start_from`: trained weights for all parameters of the same name and shape, instead of the recipe's.
    """
    check_run(recipe, store)
    recipe = _with_fingerprint(recipe, store)
    execution = execution_for(device, engine, precision, recipe.in_training())
    _check_empty(out)
    if out.exists() and not out.is_dir():
        raise TridentError(f"{out} is a file: --out needs a folder")
    provenance: dict[str, Any] = {
        "trident": trident.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        "device_name": device_name(device),
        "engine": execution.engine,
        "precision": execution.precision,
        "data": data,
        "dataset": store.dataset,
        "fingerprint": store.fingerprint,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    parameters = recipe.initial(recipe.training.seed)
    if start_from is None and recipe.training.start_from is not None:
        start_from = load_checkpoint(_starting_weights(recipe, recipe.training.start_from, out))
    if start_from is not None:
        provenance["start"] = start_from.summary() | {"provenance": start_from.provenance}
        parameters = _with_trained_values(parameters, recipe, start_from)
    start = Checkpoint(recipe, parameters, recipe.model.initial_running(), step=0, provenance=provenance)
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with run_lock(out):
            _check_empty(out)  # another process may have been faster
            save_checkpoint(out / LAST, start)
    except OSError as error:
        raise TridentError(f"cannot make the folder {out}: {error.strerror}") from error
    except TridentError:
        if not existed:
            with suppress(OSError):
                out.rmdir()
        raise
    return start


def _with_fingerprint(recipe: Recipe, store: ImageStore) -> Recipe:
    """A run on features records the fingerprint of their network, so that no others are taken later."""
    if isinstance(recipe.backbone, FrozenBackbone) and store.features_fingerprint:
        recipe = replace(recipe, backbone=replace(recipe.backbone, fingerprint=store.features_fingerprint))
    return recipe


def _starting_weights(recipe: Recipe, start_from: str, out: Path) -> Path | str:
    """The path or name of the weights that training starts from."""
    if not start_from.startswith(STAGE_PREFIX):
        return start_from
    if not (out / STAGE_FOLDER).is_dir():
        not_yet = f"{recipe.name} starts from {start_from}, which is not trained yet"
        raise TridentError(f"{not_yet}: only 'trident train' trains both")
    return out / STAGE_FOLDER


def _check_empty(out: Path) -> None:
    """What a run without weights leaves may be there: the stage before, a lock, a log."""
    if (out / LAST).exists() or (out / BEST).exists():
        raise TridentError(f"{out} already holds a run: continue it with --resume {out}, or choose another folder")
    others = [path.name for path in out.glob("[!.]*") if path.name not in (STAGE_FOLDER, "lock", LOG, "tensorboard")]
    if others:
        raise TridentError(f"{out} holds other files, such as {min(others)}: choose a new or an empty folder")


def _with_trained_values(parameters: Parameters, recipe: Recipe, start_from: Checkpoint) -> Parameters:
    """The parameters, with trained values of the same name and shape; of another method, the backbone's alone."""
    same_method = type(recipe.method) is type(start_from.recipe.method)
    copied = {
        key: value
        for key, value in start_from.parameters.items()
        if key in parameters and value.shape == parameters[key].shape and (same_method or key in recipe.backbone.names)
    }
    if not any(key in recipe.backbone.names for key in copied):
        raise TridentError(f"{start_from.path} cannot be started from: its backbone has another shape")
    return parameters | copied


def check_same_data(checkpoint: Checkpoint, store: ImageStore, out: Path) -> None:
    """Raise an error if the run was trained on other data than these."""
    if checkpoint.provenance["fingerprint"] != store.fingerprint:
        raise TridentError(
            f"{out} was trained on other data: its {checkpoint.provenance['dataset']} has the fingerprint "
            f"{checkpoint.provenance['fingerprint'][:12]}, this one {store.fingerprint[:12]}"
        )


def restart_run(recipe: Recipe, store: ImageStore, out: Path) -> Checkpoint | None:
    """The last checkpoint of a run that torchrun starts again; None if it ended before its first save."""
    if not (out / LAST).is_file():
        return None
    before = load_checkpoint(out / LAST)
    check_same_data(before, store, out)
    if before.recipe != _with_fingerprint(recipe, store):
        raise TridentError(f"{out} holds a run with other settings: it cannot be continued; choose another folder")
    return before


def check_resumable(before: Recipe, after: Recipe) -> None:
    """Raise an error if a setting changed that must stay the same in a run."""
    free = {"steps", "tasks_per_chunk", "validate_every", "validation_tasks", "save_every", "log_every"}
    if before.training.schedule == "cosine":
        free.discard("steps")  # the schedule depends on their number
    kept = {name: getattr(before.training, name) for name in free}
    if replace(after, training=replace(after.training, **kept)) != before:
        raise TridentError(f"a resumed run can only change {', '.join(f'training.{name}' for name in sorted(free))}")
