"""The command as a user runs it, and in this very process, which saves loading torch anew."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from ablation_grids import Answer
from trident.cli import main
from trident.cli.app import app


def run_here(folder: Path, *arguments: object, command: typer.Typer = app) -> Answer:
    """`trident`, or the command of a study, with these arguments, in a folder; what it says is returned."""
    # With a buffer each, and as Python opens them: what cannot be encoded is escaped in messages only.
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True) for errors in ("strict", "backslashreplace")
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["trident", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main(command)
    out.seek(0)
    err.seek(0)
    return Answer([], int(caught.value.code or 0), out.read(), err.read())


Trident_command = Callable[..., subprocess.CompletedProcess[str]]


def run_trident(
    folder: Path, *arguments: object, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """The command, run in a folder as a user would."""
    command = [sys.executable, "-m", "trident", *map(str, arguments)]
    environment = os.environ | (env or {})
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def assert_one_line_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("trident: error: ")
    for word in words:
        assert word in lines[0], lines[0]
