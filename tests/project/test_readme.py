"""Every command and the Python examples of the README, each run in a folder that holds what it needs."""

import contextlib
import io
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from commands import run_here
from trident.recipes.loading import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]]
SHORT = ["training.steps=2", "training.tasks_per_step=1", "training.validation_tasks=2", "training.save_every=1"]
FEW_TASKS = {
    "leaderboard --quick": ["--tasks", "2"],
    "report": ["--audit-tasks", "2"],
    "evaluate": ["--temperature-tasks", "2"],
    "compare": ["--tasks", "2"],
    "ablate": ["--tasks", "2"],
    "web": ["--help"],  # it would serve until it is stopped; tests/web/test_web_browser.py goes there
}
NOT_AT_HAND = ("downloads/mini-imagenet", "mini.store", "cub.store")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("trident ")]


def shortened(command: str) -> list[str]:
    """The command's arguments, with so few steps and tasks that it takes seconds."""
    given = command.split()[1:]
    if given[0] in ("train", "ablate") and "--resume" not in given:
        given += SHORT if "backbone.channels" in command else [*SHORT, "backbone.channels=8"]
    if "--tasks" in given:
        given[given.index("--tasks") + 1] = "2"
    return given + FEW_TASKS.get(" ".join(given[:2]), FEW_TASKS.get(given[0], []))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures to label, and the two runs that the README trains."""
    folder = tmp_path_factory.mktemp("readme")
    for place, name in enumerate(("labelled/cat", "labelled/dog", "pile")):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (90, 84), (80 * place, 120, 200 - 60 * place)).save(folder / name / "picture.jpg")
    written = run_here(folder, "predict", "--support", "labelled", "--query", "pile", "--out", "labels.csv")
    fitted = run_here(folder, "fit", "--support", "labelled", "--out", "mine.trident")
    assert written.returncode == fitted.returncode == 0, written.stderr + fitted.stderr
    for name, seed in (("first", 0), ("second", 1)):
        small = ["backbone.channels=8", f"training.seed={seed}"]
        trained = run_here(folder, "train", "glyphs", "--out", f"runs/{name}", *SHORT, *small)
        assert trained.returncode == 0, trained.stderr
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "folder")


def test_there_are_commands() -> None:
    assert len(commands()) >= 10
    assert len(set(commands())) == len(commands())


SLOW = ("trident evaluate runs/first --also", "trident leaderboard --quick", "trident report runs/first")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=pytest.mark.slow) if line.startswith(SLOW) else line
        for line in commands()
        if f"{line} --show" not in commands()  # which runs it first
    ],
)
def test_every_command_works(command: str, folder: Path, request: pytest.FixtureRequest) -> None:
    words = command.split()
    if words[1] == "report":
        request.getfixturevalue("no_umap")
    if words[1] == "train" and "--out" in words:
        shutil.rmtree(folder / words[words.index("--out") + 1], ignore_errors=True)
    if "--show" in words:  # what there is to show comes from the same command without it
        before = command.removesuffix(" --show")
        assert before in commands()
        made = run_here(folder, *shortened(before))
        assert made.returncode == 0, made.stderr
    result = run_here(folder, *shortened(command))
    if any(name in words for name in NOT_AT_HAND):
        # The options are right if the only complaint is about files that are not here.
        assert result.returncode == 2, result.stderr
        assert any(name in result.stderr for name in (*NOT_AT_HAND, "runs/mini")), result.stderr
    else:
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("code", "printed"),
    list(zip(blocks("python"), ("pile/picture.jpg", "minus nearest-mean", "shuffled queries"), strict=True)),
)
def test_every_python_example_works(code: str, printed: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code.replace("tasks=100", "tasks=2"), "README.md", "exec"), {"__name__": "readme"})
    assert printed in said.getvalue()


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
        f"(glyphs test, {spec.describe()}, {spec.n_query} queries per class, {recipe.describe_protocol()}, "
        f"{tasks[1]} tasks, 95 % interval, seed 0; "
        "recipe glyphs, trained on glyphs for "
    )
    assert re.fullmatch(
        r"No dependence on query order found: .* by [+-]\d\.\d\d ± \d\.\d\d points, on \d+ tasks\.", verdict
    )


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    """Those of docs/extending.md are still to be written, and docs/log.md tells of old ones."""
    if document not in ("docs/extending.md", "docs/log.md"):
        for name in re.findall(r"`([\w-]+/[\w/.-]+\.py)`", (ROOT / document).read_text("utf-8")):
            assert (ROOT / name).exists() or (ROOT / "src" / "trident" / name).exists(), name
    if document != "docs/log.md":
        for module in re.findall(r"python -m (studies[\w.]*\w)", (ROOT / document).read_text("utf-8")):
            assert find_spec(module), module


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_leave_the_test_classes_alone(document: str) -> None:
    assert document == "docs/log.md" or 'split="test"' not in (ROOT / document).read_text("utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target
