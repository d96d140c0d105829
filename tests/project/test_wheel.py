"""The package as others install it: a wheel built from this tree, in a folder of its own, without the clone."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stand_in_backbone import SUPPORT, picture
from trident.methods.registry import METHODS
from trident.recipes.files import recipe_names
from trident.weights import FOLDER
from web_server import Site, pile, three_classes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "trident-fewshot"


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building writes into the tree. Nothing is downloaded."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src" / "trident", tree / "src" / "trident", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", tree, "--no-build-isolation", "--wheel-dir", made)
    [found] = made.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", wheel, "--target", target)
    return target


def pip(command: str, what: Path, *options: object) -> None:
    always = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    call = [sys.executable, "-m", "pip", command, *always, *map(str, options), str(what)]
    result = subprocess.run(call, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def call_of(installed: Path, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """Python and its environment: the folder and what else is installed here, but not the clone.

    Without `site` (-S) no .pth file is read, which is how an editable install is found.
    """
    paths = [installed, Path(sysconfig.get_paths()["purelib"]), Path(sysconfig.get_paths()["platlib"])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-S", "-P", *map(str, arguments)], environment


Run = Callable[..., str]


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Python with some arguments, in an empty folder; what it prints."""

    def run(*arguments: object) -> str:
        call, environment = call_of(installed, *arguments)
        result = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_it_holds_every_file_of_the_package_and_is_found_there(wheel: Path, installed: Path, run: Run) -> None:
    assert wheel.name.startswith("trident_fewshot-")
    assert files_below(installed / "trident") == files_below(ROOT / "src" / "trident")
    program = (
        "import importlib.metadata, json, trident\n"
        f"found = importlib.metadata.distribution('{DISTRIBUTION}')\n"
        "print(json.dumps([trident.__file__, trident.__version__, found.version, found.metadata['Name']]))"
    )
    where, version, *about = json.loads(run("-c", program))
    assert Path(where) == installed / "trident" / "__init__.py"
    assert about == [version, DISTRIBUTION]
    with zipfile.ZipFile(wheel) as content:
        [name] = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        wants = [row for row in content.read(name).decode().splitlines() if row.startswith("Requires-Dist: ")]
    assert any(row.startswith("Requires-Dist: trident-fewshot[analysis,web]") for row in wants)
    assert not [row for row in wants if row.startswith(("Requires-Dist: trident[", "Requires-Dist: trident;"))]


def test_its_lists_are_complete(installed: Path, run: Run) -> None:
    assert [entry["name"] for entry in json.loads(run("-m", "trident", "weights", "--json"))] == sorted(
        path.stem for path in FOLDER.glob("*.safetensors")
    )
    for command, names in (("recipes", recipe_names()), ("methods", list(METHODS))):
        listed = [row.split()[0] for row in run("-m", "trident", command).splitlines() if row]
        assert set(names) <= set(listed), command
    assert "predict" in run(installed / "bin" / "trident", "--help")  # the command itself


def test_it_labels_pictures(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pile").mkdir()
    for place, colour in enumerate(SUPPORT):
        (tmp_path / "support" / colour).mkdir(parents=True)
        picture(colour, place).save(tmp_path / "support" / colour / "0.png")
        picture(colour, 10 + place).save(tmp_path / "pile" / f"{colour}.png")
    rows = csv.DictReader(io.StringIO(run("-m", "trident", "predict", "--support", "support", "--query", "pile")))
    assert {Path(row["path"]).stem: row["label"] for row in rows} == {colour: colour for colour in SUPPORT}


def test_it_trains_on_its_glyphs_and_reports(run: Run, tmp_path: Path) -> None:
    # Prototypical Networks have no latents to project, which would take half a minute.
    small = ("training.steps=2", "tasks_per_step=1", "validation_tasks=2", "validate_every=2", "backbone.channels=4")
    run("-m", "trident", "train", "glyphs-protonet", "--out", "run", *small)
    run("-m", "trident", "report", "run", "--tasks", "2", "--audit-tasks", "2")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert page.rstrip().endswith("</html>")
    assert "glyphs val, 5-way 1-shot" in page


def test_it_serves_its_page(installed: Path, tmp_path: Path) -> None:
    call, environment = call_of(installed, "-m", "trident", "web", "--port", "0")
    pipes: Any = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, cwd=tmp_path, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            with closing(process.stdout):
                server = Site(process.stdout.readline().split()[0])
                for path in (ROOT / "src" / "trident" / "web" / "static").iterdir():
                    status, _, content = server.get(f"/{path.name}")
                    assert (status, content) == (200, path.read_bytes())
                status, answer = server.ask(three_classes(), pile(3))
            assert status == 200
            assert [one["ranking"][0][0] for one in answer["pile"]] == list(SUPPORT)
        finally:
            process.terminate()
