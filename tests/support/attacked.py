"""Commands that are attacked, in folders of their own, and checks of what they leave there; see `attacks.py`."""

import functools
import importlib
import importlib.util
import json
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer.main
from PIL import Image
from safetensors import safe_open

import trident.cli
import trident.labelling.feature_labeller
import trident.labelling.making
import trident.learning.run_log
import trident.learning.training
from ablation_grids import TINY_RECIPE as TINY_RUN
from commands import run_here
from data_pictures import save_class_folders
from stand_in_backbone import NAME, SUPPORT, save_pictures
from stores import write_store
from system_calls import CHANGES, Call, Disk, Process, Rule, go_on, run
from tiny import TINY_BACKBONE, TINY_RECIPE, tiny_store
from trident.backbones.pretrained import find_backbone
from trident.cli.app import main
from trident.data import resuming
from trident.data.decoding_process import DecodingProcesses
from trident.data.images import ImageFile
from trident.labelling import feature_cache
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.label_latents import latents_for
from trident.labelling.tables import mark_of
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

USUAL = Disk()
Work = Callable[[], object]
TWICE = ("now, but", "it already exists")  # what a move says whose old file is still there
LEFTOVERS = (".part", ".link", "-journal", ".journal", ".lock", "-wal")
PREDICT = ("predict", "--support", "support", "--query", "pile", "--device", "cpu", "--backbone")


def nothing() -> None: ...


@dataclass(frozen=True)
class Command:
    """A command, what it makes, and how it goes on after a kill."""

    arguments: tuple[str, ...]
    made: tuple[str, ...]  # files and folders
    moves: bool = False
    resumes: Callable[[Path], tuple[str, ...] | None] = lambda folder: None


def resumed_run(folder: Path) -> tuple[str, ...] | None:
    return ("train", "--resume", "run") if (folder / "run" / "last.safetensors").exists() else None


COMMANDS = {
    "predict": Command((*PREDICT, NAME, "--out", "labels.json", "--all"), ("labels.json",)),
    "copy": Command(("sort", "labels.csv", "--to", "sorted", "--yes"), ("sorted",)),
    "move": Command(("sort", "labels.csv", "--to", "sorted", "--move", "--yes"), ("sorted",), moves=True),
    "onnx": Command((*PREDICT, "onnx:small.onnx", "--out", "labels.json", "--all"), ("labels.json",)),
    "weights": Command((*PREDICT, "weights:trained.safetensors", "--out", "labels.json", "--all"), ("labels.json",)),
    "fit": Command(
        ("fit", "--support", "support", "--backbone", NAME, "--device", "cpu", "--out", "pets.trident"),
        ("pets.trident",),
    ),
    "prepare": Command(
        ("data", "prepare", "folder", "--from", "data", "--to", "pets.store", "--image-size", "20", "--workers", "1"),
        ("pets.store",),
    ),
    "features": Command(
        ("data", "prepare", "folder", "--from", "data", "--to", "pets.store", "--features", NAME, "--device", "cpu"),
        ("pets.store",),
    ),
    "train": Command(
        ("train", "tiny.toml", "--data", "noise.store", "--out", "run", "--device", "cpu"),
        ("run",),
        resumes=resumed_run,
    ),
}


@dataclass
class World:
    """A folder with all that the commands need, which is copied for each case."""

    template: Path
    commands: tuple[str, ...] = tuple(COMMANDS)
    expected: dict[str, dict[str, object]] = field(default_factory=dict)  # what each command makes if undisturbed
    calls: dict[tuple[str, Disk, tuple[str, ...]], list[Call]] = field(default_factory=dict)

    @classmethod
    def made(cls, place: Path, commands: tuple[str, ...] = tuple(COMMANDS)) -> "World":
        load_all(training="train" in commands)
        folder = place / "template"
        folder.mkdir()
        if "TRIDENT_SAMPLES" in os.environ:
            _real_pictures(Path(os.environ["TRIDENT_SAMPLES"]), folder)
        else:
            for colour in SUPPORT:
                save_pictures(folder / "support" / colour, {colour: 2}, first=900)
            save_pictures(folder / "pile", dict.fromkeys(SUPPORT, 2))
        _save_labels(folder)
        save_class_folders(folder / "data", {"train/ant": 4, "val/cow": 3, "test/dog": 3}, 20)
        if "onnx" in commands:
            from onnx_files import small_onnx  # takes long

            small_onnx(folder / "small.onnx")
        if "weights" in commands:
            save_weights(folder / "trained.safetensors", 0)
        if "train" in commands:
            store = tiny_store()
            write_store(folder / "noise.store", "noise", store.classes, iter(store.images))
            (folder / "tiny.toml").write_text(TINY_RUN)
        return cls(folder, commands)

    def fresh(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.template.parent))
        shutil.copytree(self.template, folder, dirs_exist_ok=True)
        return folder

    def process(
        self,
        name: str,
        folder: Path,
        arguments: tuple[str, ...] | None = None,
        disk: Disk = USUAL,
        *,
        names: tuple[str, ...] = CHANGES,
        rule: Rule = go_on,
        prepare: Work = nothing,
    ) -> Process:
        """The command in this folder; `prepare` changes the process in which it runs."""

        def work() -> None:
            os.chdir(folder)
            os.environ["TRIDENT_CACHE"] = str(folder / "cache")
            DecodingProcesses.decode = lambda self, source, target, seconds=0.0: target.decode(source)  # type: ignore[method-assign]
            DecodingProcesses.start = lambda self, n=1: None  # type: ignore[method-assign]
            importlib.util.find_spec = lambda name, package=None: None  # no TensorBoard, which takes long
            resuming.SAVE_SECONDS = 0.0
            feature_cache._check_locks.cache_clear()  # this process may have none, unlike the one that it comes from
            sys.argv = ["trident", *(arguments or COMMANDS[name].arguments)]
            prepare()
            main()

        return Process(work, folder, names, rule, disk)

    def undisturbed(self, name: str, disk: Disk = USUAL, names: tuple[str, ...] = CHANGES) -> list[Call]:
        """The calls of a command; what it makes is kept for comparison."""
        key = (name, disk, names)
        if key not in self.calls:
            folder = self.fresh()
            process = self.process(name, folder, None, disk, names=names)
            run(process)
            assert process.code == 0, process.errors
            self.expected.setdefault(name, made(folder, COMMANDS[name]))
            self.calls[key] = process.calls
            shutil.rmtree(folder)
        return self.calls[key]

    def places(self, name: str, disk: Disk = USUAL) -> list[tuple[int, Call]]:
        """The calls of a command by their number; those of the cache only for `predict`, since they are the same."""
        calls = enumerate(self.undisturbed(name, disk), 1)
        return [(n, call) for n, call in calls if name == "predict" or "cache" not in call.path.parts]

    def check(self, name: str, folder: Path, done: bool, said: str = "", disk: Disk = USUAL) -> None:
        """Inputs are as they were, and what is there is whole. `done`: everything is there, and nothing else.

        There are two exceptions. A move that could not delete the old file says so. Without links, files are copied
        twice if two commands copy them, and a kill can leave an empty one.
        """
        command = COMMANDS[name]
        inputs, now = contents(self.template), contents(folder)
        if command.moves:
            pile = [content for path, content in inputs.items() if path.startswith("pile/")]
            there = [
                content
                for path, content in now.items()
                if path.startswith(("pile/", "sorted/")) and not path.endswith(LEFTOVERS)
            ]
            assert set(there) - {b""} == set(pile), "a picture is lost or damaged"
            if done and not any(words in said for words in TWICE):
                assert sorted(there) == sorted(pile) or not disk.links, "a picture is there twice"
                assert not any(path.startswith("pile/") for path in now), "a picture was not moved"
            inputs = {path: content for path, content in inputs.items() if not path.startswith("pile/")}
        changed = [path for path, content in inputs.items() if now.get(path) != content]
        assert not changed, f"inputs changed: {changed}"
        if not command.moves and name != "train":
            found = made(folder, command)
            expected = self.expected[name]
            odd = [path for path, content in found.items() if expected.get(path) != content]
            if not disk.links:
                odd = [path for path in odd if found[path] not in ("", b"", *expected.values())]
            assert not odd, f"not as undisturbed: {odd}"
        if done:
            # They are left where nobody knows whether they are still in use.
            may = (".part", ".link") if not disk.locks else ()
            left = [path for path in now if path.endswith(LEFTOVERS) and not path.endswith(may)]
            assert not left, f"left over: {left}"
            if not command.moves:
                found, expected = made(folder, command), self.expected[name]
                if not disk.links and name == "copy":
                    assert set(expected.values()) <= set(found.values()), "a copy is missing"
                else:
                    assert found == expected, "the result differs"
        self.check_cache(folder)

    def check_cache(self, folder: Path) -> None:
        """What is kept is what the backbone gives for the picture."""
        if not (folder / "cache").exists():
            return
        pictures = [ImageFile(path) for part in ("support", "pile") for path in (self.template / part).rglob("*.*")]
        cache = FeatureCache(folder / "cache")
        assert cache.problem is None, cache.problem
        for name in (NAME,):
            backbone = find_backbone(name)
            found = cache.get(backbone.fingerprint, [one.key() for one in pictures], backbone.n_features)
            for one in pictures:
                if one.key() in found:
                    pixels = np.stack([_decoded(backbone, one)])
                    assert np.array_equal(found[one.key()], backbone.features(pixels)[0]), f"wrong features: {one.name}"


def _decoded(backbone: Any, picture: ImageFile) -> np.ndarray:
    from trident.data.images import Target

    return Target(backbone.facts.image_size, 3, reduced=True, centre_crop=backbone.facts.centre_crop).decode(picture)


def save_weights(path: Path, seed: int) -> None:
    """A Conv4 with random weights, for features."""
    recipe = replace(TINY_RECIPE, backbone=replace(TINY_BACKBONE, image_channels=3))
    weights = recipe.initial(seed)
    save_checkpoint(
        path, Checkpoint(recipe, weights, recipe.model.initial_running(), 1, provenance={"dataset": "noise"})
    )


def load_all(training: bool) -> None:
    """Load what the commands need now, and not once more in each child."""
    Image.init()
    latents_for(NAME)

    typer.main.get_command = functools.cache(typer.main.get_command)
    run_here(Path(), "--version")
    for module in pkgutil.walk_packages(trident.__path__, "trident."):
        if module.name.split(".")[1] in (
            "labelling",
            "data",
            "backbones",
            *(("learning", "measuring") if training else ()),
        ):
            importlib.import_module(module.name)
    if training:
        importlib.import_module("torch._dynamo")  # that of optimisers


def _real_pictures(samples: Path, folder: Path) -> None:
    """Photographs of three classes, made smaller."""
    by_class: dict[str, list[Path]] = {}
    for path in sorted((samples / "mini_imagenet" / "images").glob("*.jpg")):
        by_class.setdefault(path.name[:9], []).append(path)
    for name, paths in list(by_class.items())[:3]:
        for place, path in enumerate(paths[:4]):
            target = folder / "support" / name if place < 2 else folder / "pile"
            target.mkdir(parents=True, exist_ok=True)
            with Image.open(path) as image:
                image.resize((60, 50)).save(target / path.name, quality=90)


def _save_labels(folder: Path) -> None:
    """The table of the pile, as `trident predict` writes it: every picture gets the first letter of its name."""
    pictures = sorted((folder / "pile").rglob("*.*"))
    lines = [f"{one.relative_to(folder)},{one.name[:1]},{mark_of(ImageFile(one))}," for one in pictures]
    (folder / "labels.csv").write_text("\n".join(["path,label,picture,correction", *lines, ""]), "utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "cache" not in path.relative_to(folder).parts
    } | {str(path.relative_to(folder)): b"" for path in folder.glob("cache/*") if path.name != "features.sqlite"}


def made(folder: Path, command: Command) -> dict[str, object]:
    """The files that a command makes, without times."""
    found: dict[str, object] = {}
    for name, content in contents(folder).items():
        if name.startswith(command.made) and not name.endswith(LEFTOVERS):
            if name.endswith(".safetensors"):
                checkpoint = load_checkpoint(folder / name)
                parts = checkpoint.parameters | checkpoint.optimizer | {"step": torch.tensor(checkpoint.step)}
                found[name] = {key: value.numpy().tobytes() for key, value in parts.items()}
            elif name.endswith(".trident"):  # the order of its header is chance
                with safe_open(folder / name, "numpy") as file:
                    found[name] = [file.metadata(), {key: file.get_tensor(key).tobytes() for key in file.keys()}]  # noqa: SIM118
            elif name.endswith(".jsonl"):
                lines = [json.loads(line) for line in content.decode().splitlines()]
                found[name] = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
            else:
                found[name] = content
    return found


def check_said(process: Process, *codes: int) -> None:
    assert process.code in codes, f"code {process.code}: {process.errors[-600:]}"
    assert "Traceback" not in process.errors, process.errors[-1200:]
    errors = [line for line in process.errors.splitlines() if line.startswith("trident: error")]
    assert len(errors) <= 1, errors
    assert process.code != 2 or any(line.startswith("trident: ") for line in process.errors.splitlines())


def finished(
    world: World, name: str, folder: Path, said: str = "", disk: Disk = USUAL, prepare: Work = nothing
) -> None:
    """The same command again, or the one that resumes, makes what an undisturbed one makes."""
    again = world.process(name, folder, COMMANDS[name].resumes(folder), disk, prepare=prepare)
    run(again)
    nothing_left = any(words in again.errors for words in ("exists already", "no picture to label"))
    check_said(again, 2 if nothing_left else 0)
    world.check(name, folder, True, said + again.errors, disk)
