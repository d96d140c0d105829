"""What several tests need: a network small enough to check exactly, tasks for it, and the command as a user runs it."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from ablation_grids import TINY_RECIPE as TINY_GRID_RECIPE
from ablation_grids import Ablate_command, Answer
from trident.backbones.conv4 import Conv4Backbone
from trident.cli import main
from trident.cli.app import app
from trident.data.store import ImageStore, class_table, store_in_memory, write_store
from trident.engines.learner import Learner
from trident.learning.inner_loop import InnerLoopLearner
from trident.methods.protonet import ProtoNet
from trident.methods.trident.method import Trident
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe
from trident.settings import EpisodeSpec, Protocol, TrainingSettings
from trident.tasks.episodes import EpisodeSampler
from trident.tasks.source import TaskSource
from trident.tasks.task import Batch, Labels, Task

TINY_EPISODE = EpisodeSpec(n_way=3, n_shot=2, n_query=2)
TINY_BACKBONE = Conv4Backbone(image_size=16, image_channels=1, channels=4)
TINY_METHOD = Trident(
    label_latents=5,
    semantic_latents=6,
    classifier_width=4,
    attfex_width_m=6,
    attfex_width_n=4,
    attention_activation=True,
    decoder_batch_norm=True,
    inner_rate=1e-3,
    inner_steps=2,
)
TINY_RECIPE = Recipe(
    name="tiny",
    summary="for tests",
    dataset="noise",
    episode=TINY_EPISODE,
    backbone=TINY_BACKBONE,
    method=TINY_METHOD,
    training=TrainingSettings(
        steps=20, tasks_per_step=2, rate=1e-3, validate_every=10, validation_tasks=4, save_every=5, log_every=2
    ),
)


class TheirMethod(ProtoNet):
    """A method of somebody else's package."""


class Silent:
    """Watches a training run and says nothing."""

    def on_step(self, step: int, values: dict[str, Any]) -> None: ...

    def on_validation(self, step: int, validated: Any, best: bool) -> None: ...


def tiny_store(images_per_class: int = 8, size: int = 16) -> ImageStore:
    """Five classes for each split, each a pattern of its own with a little noise."""
    generator = np.random.default_rng(7)
    patterns = generator.integers(0, 200, (15, 1, size, size, 1))
    images = patterns + generator.integers(0, 56, (15, images_per_class, size, size, 1))
    names = [
        (f"class {i}", split, images_per_class) for i, split in enumerate(["train"] * 5 + ["val"] * 5 + ["test"] * 5)
    ]
    return store_in_memory("noise", images.reshape(-1, size, size, 1).astype(np.uint8), class_table(names))


def tiny_tasks(n_tasks: int = 2, inner_steps: int = 3, seed: int = 0, episode: EpisodeSpec = TINY_EPISODE) -> Batch:
    """Random tasks in float64, with noise for TINY_METHOD."""
    generator = torch.Generator().manual_seed(seed)
    model = replace(TINY_METHOD, inner_steps=inner_steps).model(TINY_BACKBONE, episode)
    noise = {
        name: torch.randn((n_tasks, *shape), generator=generator, dtype=torch.float64)
        for name, shape in model.noise_shapes(episode, 1).items()
    }
    size = TINY_BACKBONE.image_size
    pixels = torch.rand(n_tasks, episode.n_images, size, size, 1, generator=generator, dtype=torch.float64)
    ways = torch.arange(episode.n_way)
    labels = torch.stack(
        [torch.randperm(episode.n_queries, generator=generator) % episode.n_way for _ in range(n_tasks)]
    )
    support_labels = ways.repeat_interleave(episode.n_shot).expand(n_tasks, -1)
    return Batch(Task(pixels, support_labels, episode.n_way, noise), Labels(labels))


def one_task(batch: Batch, index: int) -> Batch:
    """One task of a batch, as a batch of its own."""
    only, (task, labels) = slice(index, index + 1), batch
    noise = {name: values[only] for name, values in task.noise.items()}
    classes = None if labels.training_classes is None else labels.training_classes[only]
    return Batch(
        Task(task.images[only], task.support_labels[only], task.n_way, noise), Labels(labels.queries[only], classes)
    )


def tiny_learner(batch_norm: str = "transductive", **method: Any) -> InnerLoopLearner:
    """TINY_METHOD with other settings where given; `channels` and `activation` are the backbone's."""
    of_backbone = {key: method.pop(key) for key in ("channels", "activation") if key in method}
    settings = replace(TINY_METHOD, **method)
    return InnerLoopLearner(settings.model(replace(TINY_BACKBONE, **of_backbone), TINY_EPISODE), batch_norm)


def initial(model: Any, seed: int = 0) -> Parameters:
    """Random weights of a model."""
    parameters: Parameters = model.initial(torch.Generator().manual_seed(seed))
    return parameters


def doubles(parameters: Parameters) -> Parameters:
    return {key: value.double() for key, value in parameters.items()}


def check_gradient(learner: Learner, parameters: Parameters, batch: Batch) -> None:
    """The gradient of the total loss, in four directions, against finite differences."""
    found = learner.gradient(parameters, batch)
    assert found.gradient.keys() == parameters.keys()
    assert found.finite.all()
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        along = {key: torch.randn(x.shape, generator=generator, dtype=x.dtype) for key, x in parameters.items()}

        def loss(distance: float, along: Parameters = along) -> float:
            moved = {key: value + distance * along[key] for key, value in parameters.items()}
            return float(learner.gradient(moved, batch).losses["total"].sum())

        actual = float(sum((found.gradient[key] * along[key]).sum() for key in along))
        # The network has kinks, which a long step may cross; a wrong gradient agrees with neither step.
        errors = [abs(actual * 2 * step / (loss(step) - loss(-step)) - 1) for step in (1e-6, 1e-7)]
        assert min(errors) < 1e-6


def source_for(recipe: Recipe, store: ImageStore, stream: str = "train", **options: Any) -> TaskSource:
    sampler = EpisodeSampler(store, stream, recipe.episode, Protocol())
    return TaskSource(sampler, recipe.model.noise_shapes(recipe.episode, 1), 0, stream, **options)


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep features in a folder of their own, also in the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


Trident_command = Callable[..., subprocess.CompletedProcess[str]]


def run_trident(
    folder: Path, *arguments: object, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """The command, run in a folder as a user would."""
    command = [sys.executable, "-m", "trident", *map(str, arguments)]
    environment = os.environ | (env or {})
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def trident(tmp_path: Path) -> Trident_command:
    """The command in an empty folder."""
    return functools.partial(run_trident, tmp_path)


@pytest.fixture
def trident_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """A command in this very process, which saves loading torch anew: `trident`, or that of a study."""

    def run(*arguments: object, command: typer.Typer = app) -> Answer:
        monkeypatch.setattr(sys, "argv", ["trident", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main(command)
        said = capsys.readouterr()
        return Answer([], int(caught.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def ablate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trident_here: Callable[..., Answer]) -> Ablate_command:
    """`trident ablate` in a folder with a tiny recipe."""
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    (tmp_path / "tiny.toml").write_text(TINY_GRID_RECIPE)
    monkeypatch.chdir(tmp_path)
    return functools.partial(trident_here, "ablate")


def assert_one_line_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("trident: error: ")
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The machine's own Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here: pages are not looked at in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        running = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield running
        running.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that tell plain colours apart, for `trident web`."""
    from web_server import tiny_weights

    return tiny_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def plain(weights: Path) -> Iterator[Any]:
    """`trident web` with those weights and its usual limits."""
    from web_server import site

    with site(weights) as running:
        yield running


@pytest.fixture(scope="module")
def address(weights: Path) -> Iterator[str]:
    """Of a `trident web` that takes files of 2 MB at most."""
    from trident.web.limits import Limits
    from web_server import site

    with site(weights, Limits(file_bytes=2_000_000)) as running:
        yield running.address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A visitor's, at that address."""
    from web_visit import visit

    with visit(browser, address) as found:
        yield found
