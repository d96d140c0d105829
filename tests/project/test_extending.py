"""docs/extending.md, carried out to the letter on a copy of the package, and its last section in this process."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")


def blocks(section: str, kind: str = "python") -> list[str]:
    """The code of one section of the page."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (found,) = [part for part in text if part.startswith(section)]
    return re.findall(rf"```{kind}\n(.*?)```", found, flags=re.DOTALL)


def insert(path: Path, before: str, text: str) -> None:
    content = path.read_text("utf-8")
    assert content.count(before) == 1, before
    path.write_text(content.replace(before, text + before), "utf-8")


def extend(package: Path) -> None:
    """What the page tells a newcomer to do."""
    methods = package / "methods"
    field, function = blocks("Add a loss term")
    objective = methods / "trident" / "objective.py"
    insert(objective, "\n    def weight", field)
    objective.write_text(objective.read_text("utf-8") + "\n\n" + function, "utf-8")
    method, line = blocks("Add a method")
    (methods / "nearest.py").write_text(method, "utf-8")
    insert(methods / "registry.py", '    "simpleshot"', line)
    reader, line = blocks("Add a dataset")
    (package / "data" / "textures.py").write_text(reader, "utf-8")
    insert(package / "data" / "__init__.py", '    "folder"', line)


# Commands, one after another in one process with the changed package, which loads torch once.
COMMANDS = """
import json, sys
from pathlib import Path
from commands import run_here
for line in sys.stdin:
    answer = run_here(Path.cwd(), *json.loads(line))
    print(json.dumps([answer.returncode, answer.stdout, answer.stderr]), flush=True)
"""


@pytest.mark.slow
def test_a_newcomer_adds_a_loss_a_method_and_a_dataset(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    extend(tmp_path / "src" / "trident")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT / 'tests' / 'support'}"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", COMMANDS], cwd=tmp_path, env=environment, **pipes)

    def trident(*arguments: object) -> str:
        print(json.dumps([str(one) for one in arguments]), file=process.stdin, flush=True)
        returned, said, complained = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        assert returned == 0, complained
        return str(said)

    short = ["training.steps=2", "validate_every=2", "validation_tasks=2", "tasks_per_step=1", "log_every=1"]
    trident("train", "glyphs", "--out", "run", "entropy_weight=5", *short)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    losses = next(line["losses"] for line in log if line["kind"] == "train")
    assert 0 < losses["entropy"] < 1.7  # at most ln 5

    recipe = (tmp_path / "src" / "trident" / "recipes" / "glyphs-matching.toml").read_text("utf-8")
    (tmp_path / "glyphs-nearest.toml").write_text(recipe.replace('name = "matching"', 'name = "nearest"'), "utf-8")
    trident("train", "glyphs-nearest.toml", "--out", "nearest", *short)
    assert "accuracy" in trident("evaluate", "nearest", "--tasks", 4)
    assert "largest cosine" in trident("methods", "nearest")

    from PIL import Image

    for i in range(6):
        folder = tmp_path / "textures" / f"class{i}"
        folder.mkdir(parents=True)
        for j in range(3):
            Image.new("RGB", (20, 20), (40 * i, 10 * j, 0)).save(folder / f"{j}.png")
    trident("data", "prepare", "textures", "--from", "textures", "--to", "textures.store", "--image-size", 16)
    shown = trident("data", "show", "textures.store")
    assert "18" in shown and "val" in shown
    process.communicate()


def test_any_function_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("Measure any function")
    names: dict[str, Any] = {}
    exec(code.replace("tasks=100", "tasks=40"), names)
    said = capsys.readouterr().out
    assert names["result"].accuracy > 40  # chance is 20
    assert "function nearest_mean, 40 tasks" in said
    assert "No dependence on query order found" in said
