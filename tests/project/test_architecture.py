"""The shape of the code: layers import downwards only, help needs no torch, methods see no truth."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple, get_type_hints

import pytest

from trident.cli.app import GROUPS
from trident.methods.base import HeadOnFeatures
from trident.methods.registry import METHODS, about, method_class, method_paths
from trident.tasks.task import Task

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "trident"
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))

LAYERS = (  # from top to bottom: each may import from those below it
    ("cli", "web"),
    ("leaderboard",),
    ("report", "grids"),
    ("labelling", "library"),
    ("measuring",),
    ("learning",),
    ("engines",),
    ("recipes",),
    ("methods",),
    ("backbones",),
    ("tasks",),
    ("nn", "data", "distributed"),
    ("settings", "allocator", "errors", "files", "importing", "progress", "ray_cluster", "weights"),
)
BESIDE = {  # in one layer
    ("cli", "web"),
    ("grids", "report"),
    ("settings", "errors"),
    ("files", "errors"),
    ("importing", "errors"),
    ("ray_cluster", "errors"),
}
WEB_COMMAND = Path("trident", "cli", "web.py")  # the only file of `cli` that may import from `web`


class Import(NamedTuple):
    line: int
    name: str  # trident.data.store, or trident.data.store.ImageStore
    at_once: bool  # when the file is imported, and not in a function


@functools.cache
def imports_of(module: Path) -> tuple[Import, ...]:
    """All imports of a file, those inside functions and under TYPE_CHECKING too."""
    tree = ast.parse((PACKAGE.parent / module).read_text("utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{module}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [Import(node.lineno, name, node in tree.body) for name in names]
    return tuple(found)


def part_of(name: str) -> str:
    """The part of the package that a module belongs to: `trident.data.store` is of `data`."""
    return name.split(".")[1]


def module_name(module: Path) -> str:
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


def test_layers_import_downwards_only() -> None:
    depth = {part: place for place, layer in enumerate(LAYERS) for part in layer}
    top_level = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(depth) == top_level - {"__init__", "__main__"}
    wrong = []
    for module in MODULES:
        name = module_name(module)
        own = "cli" if name in ("trident", "trident.__main__") else name.partition(".")[2].split(".")[0]
        for one in imports_of(module):
            if not one.name.startswith("trident.") or part_of(one.name) == own or one.name == "trident.__version__":
                continue
            other = part_of(one.name)
            allowed = (own in depth and depth[own] < depth[other]) or (own, other) in BESIDE
            if not allowed or (other == "web" and module != WEB_COMMAND):
                wrong.append(f"{module}:{one.line} imports {one.name}")
    assert wrong == []


def test_the_web_extra_need_not_be_installed() -> None:
    extra = ("starlette", "uvicorn", "python_multipart", "trident.web")
    for module in MODULES:
        if module.parts[1] != "web":
            assert not [one for one in imports_of(module) if one.at_once and one.name.startswith(extra)], module


def test_no_import_cycles() -> None:
    names = {module_name(module) for module in MODULES}

    def targets(module: Path) -> set[str]:
        found = {one.name for one in imports_of(module)}
        found = {name if name in names else name.rpartition(".")[0] for name in found}
        return (found & names) - {"trident", module_name(module)}

    graph = {module_name(module): targets(module) for module in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_few_files_lie_at_the_top() -> None:
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 12


@pytest.mark.parametrize("package", [module for module in MODULES if module.name == "__init__.py"], ids=str)
def test_every_package_says_what_it_is(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE.parent / package).read_text("utf-8"))) or ""
    assert re.match(r"\S+ .*\.$", docstring, re.DOTALL), docstring


QUICK = (  # commands that answer at once, and a word of the answer
    *("--help evaluate", "data --help prepare", "leaderboard --help measure"),
    *("data prepare --help Options:", "data show --help Options:", "data cache --help Options:"),
    *("methods protonet", "methods --json protonet"),
    *("recipes mini-5w5s", "recipes --json mini-5w5s"),
    *("weights mini-ensemble", "weights --json mini-ensemble", "ablate glyphs-2x2", "leaderboard boards glyphs"),
    *("fly 'fly'", "predict --qery query", "evaluate RUN", "calibrate runs/a evaluate", "predict --copy a sort"),
    *("methods protonte 'protonet'", "recipes glyph 'glyphs'", "weights mini-ensembel 'mini-ensemble'"),
    *(
        "evaluate mini-ensembel 'mini-ensemble'",
        "report nowhere nowhere",
        "compare a b a",
        "train glyph --out r 'glyphs'",
    ),
    *("ablate glyphs-2x3 glyphs-2x2", "leaderboard --board mini-1-shto mini-1-shot"),
)


def test_lists_help_and_mistakes_do_not_wait_for_torch() -> None:
    """Timing is left to benchmarks; what makes answers slow is importing torch, and that can be seen exactly."""
    code = """
import contextlib, io, sys
from trident.cli import main
HEAVY = {"torch", "numpy", "PIL", "starlette", "uvicorn"}
for line in sys.argv[1:]:
    *words, expected = line.split()
    if words == ["leaderboard"]:
        HEAVY -= {"numpy"}  # it tells the difference of two rows task by task
    if words[0] == "backbones":
        HEAVY -= {"numpy", "PIL"}
    said = io.StringIO()
    sys.argv = ["trident", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main()
    assert expected in said.getvalue(), (line, said.getvalue())
    assert not HEAVY & set(sys.modules), (line, HEAVY & set(sys.modules))
"""
    groups = {"data", "leaderboard"}
    helped = [f"{name} --help Options:" for names in GROUPS.values() for name in names if name not in groups]
    lines = [*QUICK, *helped, "leaderboard protonet", "backbones efficientnet-lite0", "backbones lite9 'lite9'"]
    result = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_facts_about_methods_are_those_of_their_default_settings() -> None:
    """The list of methods reads them from the source."""
    for name in METHODS:
        method, facts = method_class(name)(), about(name)
        assert facts == method.about
        told = (facts.transductive, facts.any_way, facts.positional)
        assert told == (method.classifies_together, method.any_way, method.positional), name


def test_methods_are_not_given_query_labels() -> None:
    """A task has no such field, and the type checker, which is strict, lets no method read what is not there."""
    assert {one.name for one in fields(Task)} == {"images", "support_labels", "n_way", "noise"}
    heads = [kind for kind in map(method_class, method_paths()) if issubclass(kind, HeadOnFeatures)]
    assert len(heads) > 20 and all(get_type_hints(kind.head)["task"] is Task for kind in heads)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert settings["strict"] is True and "src" in settings["files"]
