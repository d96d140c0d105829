"""The command in this very process, for fixtures that serve a whole module: loading torch anew takes seconds."""

import contextlib
import io
import sys
from pathlib import Path

import pytest

from ablation_grids import Answer
from trident.cli import main


def run_here(folder: Path, *arguments: object) -> Answer:
    """`trident` with these arguments, in a folder; what it says is returned."""
    # With a buffer each, and as Python opens them: what cannot be encoded is escaped in messages only.
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True) for errors in ("strict", "backslashreplace")
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["trident", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    out.seek(0)
    err.seek(0)
    return Answer([], int(caught.value.code or 0), out.read(), err.read())
