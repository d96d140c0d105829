"""What several tests need: the command as a user runs it, and a browser."""

import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer
from torch import nn

from ablation_grids import TINY_RECIPE as TINY_GRID_RECIPE
from ablation_grids import Ablate_command, Answer
from commands import Trident_command, run_trident
from stores import write_store
from tiny import tiny_store
from trident.backbones import torch_module
from trident.backbones.pretrained import BACKBONES, Compute, Facts
from trident.cli import main
from trident.cli.app import app
from trident.measuring import decoupling

hypothesis.settings.register_profile("patient", deadline=None)  # other tests run at the same time
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests keep features in a folder of their own, also in the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def networks_are_traced_once() -> Iterator[None]:
    """EfficientNet is traced once in a process, which takes seconds, and not once for each command."""
    compiled, known = torch_module._compiled, {}

    def once(name: str, facts: Facts, module: nn.Module, device: str) -> tuple[Compute, int]:
        if name not in BACKBONES:
            return compiled(name, facts, module, device)
        if (name, device) not in known:
            known[name, device] = compiled(name, facts, module, device)
        return known[name, device]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_module, "_compiled", once)
        yield


@pytest.fixture(scope="module")
def no_umap() -> Iterator[None]:
    """Latents are drawn by two of their numbers: UMAP is compiled anew in every process, which takes 15 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoupling, "project", lambda points, seed: points[:, :2])
        yield


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
