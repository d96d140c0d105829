"""Every command and the Python example of the README, run in order in an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from conftest import Trident_command
from trident.recipes import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHORT = ["training.steps=2", "training.tasks_per_step=1", "training.validation_tasks=2", "training.save_every=1"]
FEW_TASKS = {
    "report": ["--audit-tasks", "2"],
    "calibrate": ["--temperature-tasks", "2"],
    "compare": ["--tasks", "2"],
    "ablate": ["--tasks", "2"],
    "bench predict": ["--pictures", "2", "--n-way", "2", "--n-shot", "1", "--repeats", "1"],
    "web": ["--help"],  # it would serve until it is stopped; tests/test_web_browser.py goes there
    "bench": ["--tasks", "1", "--repeats", "1", "image_size=16", "channels=4", "adaptation.steps=1"],
}
NOT_AT_HAND = ("downloads/mini-imagenet", "mini.store", "cub.store")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("trident ")]


def test_every_command_works(trident: Trident_command, tmp_path: Path) -> None:
    assert len(commands()) >= 10
    for place, name in enumerate(("labelled/cat", "labelled/dog", "pile")):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (90, 84), (80 * place, 120, 200 - 60 * place)).save(tmp_path / name / "picture.jpg")
    for command in commands():
        given = list(command)
        if given[0] in ("train", "ablate") and "--resume" not in given:
            given += SHORT
        if "--tasks" in given:
            given[given.index("--tasks") + 1] = "2"
        given += FEW_TASKS.get(" ".join(given[:2]), FEW_TASKS.get(given[0], []))
        result = trident(*given)
        if any(name in command for name in NOT_AT_HAND):
            # The options are right if the only complaint is about files that are not here.
            assert result.returncode == 2, result.stderr
            assert any(name in result.stderr for name in (*NOT_AT_HAND, "runs/mini")), result.stderr
        else:
            assert result.returncode == 0, (command, result.stderr)
    for block, printed in zip(blocks("python"), ("pile/picture.jpg", "shuffled queries"), strict=True):
        code = block.replace("tasks=100", "tasks=2")
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout


def test_the_demos_result_is_shown_with_its_protocol() -> None:
    """As the demo prints it: the words come from the code and the Makefile, the figures from the last run by hand."""
    (shown,) = blocks("text")
    first, protocol, verdict = shown.strip().splitlines()
    assert re.fullmatch(r"accuracy \d\d\.\d\d ± \d\.\d\d %", first)
    recipe = load_recipe("glyphs")
    tasks = re.search(r"trident report \$\(RUN\) --tasks (\d+)", (ROOT / "Makefile").read_text("utf-8"))
    assert tasks is not None
    spec = recipe.episode
    assert protocol.startswith(
        f"(glyphs test, {spec.describe()}, {spec.n_query} queries per class, {recipe.protocol.describe()}, "
        f"{recipe.adaptation.describe()}, {tasks[1]} tasks, 95 % interval, seed 0; "
        "recipe glyphs, trained on glyphs for "
    )
    assert re.fullmatch(r"No dependence on query order found: .* by [+-]\d\.\d\d ± \d\.\d\d points\.", verdict)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]]
)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target
