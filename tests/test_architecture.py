"""The shape of the code: imports run one way, help needs no torch, files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "trident"
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))


def imported_by(module: Path) -> set[str]:
    """Modules of ours that a file imports when it is itself imported; those inside functions count too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE.parent / module).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("trident")}


def test_data_and_networks_do_not_know_each_other() -> None:
    for module in MODULES:
        if "data" in module.parts:
            assert not any(name.startswith("trident.nn") for name in imported_by(module)), module
        if "nn" in module.parts:
            assert all(name.startswith(("trident.nn", "trident.errors")) for name in imported_by(module)), module


def test_nothing_imports_the_command_line() -> None:
    leaves = ("trident.cli", "trident.cli.console")
    for module in MODULES:
        if "cli" not in module.parts and module.name != "__main__.py":
            assert not any(name.startswith(leaf) for name in imported_by(module) for leaf in leaves), module


def test_only_its_command_knows_the_web_page() -> None:
    """It is an extra, and not installed everywhere."""
    extra = ("fastapi", "starlette", "uvicorn", "python_multipart")
    for module in MODULES:
        text = (PACKAGE.parent / module).read_text("utf-8")
        at_once = {
            name
            for node in ast.parse(text).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        }
        if "web" not in module.parts:
            assert not any(name.startswith(extra) for name in at_once), module
            assert not any(name.startswith("trident.web") for name in at_once), module
            if module.parts[-2:] != ("cli", "web.py"):
                assert not any(name.startswith("trident.web") for name in imported_by(module)), module


def test_no_import_cycles() -> None:
    graph = {
        ".".join(module.with_suffix("").parts).removesuffix(".__init__"): imported_by(module) for module in MODULES
    }
    graph = {
        name: {other for other in found if other in graph and other not in ("trident", name)}
        for name, found in graph.items()
    }

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for other in graph[name]:
            visit(other, (*path, name))

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "module",
    [*MODULES, *(path.relative_to(PACKAGE.parent) for path in sorted((PACKAGE / "web" / "static").iterdir()))],
    ids=str,
)
def test_files_can_be_taken_in_at_once(module: Path) -> None:
    assert len((PACKAGE.parent / module).read_text("utf-8").splitlines()) <= 350


@pytest.mark.parametrize(("arguments", "said"), [(["--help"], "evaluate"), (["web", "--help"], "--megapixels")])
def test_help_does_not_wait_for_torch(arguments: list[str], said: str) -> None:
    """Timing is left to benchmarks; what makes help slow is importing torch, and that can be seen exactly."""
    code = (
        f"import sys; sys.argv = ['trident', *{arguments}]\n"
        "from trident.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'PIL', 'fastapi', 'uvicorn'} & set(sys.modules), 'heavy imports'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
