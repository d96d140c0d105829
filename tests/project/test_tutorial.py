"""docs/tutorial.md and the example of docs/classifier.md: every block run in order, and what it prints compared."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = re.compile(r"\d+\.\d+")
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Code, and what it is said to print."""
    return [(code, output) for code, output in BLOCK.findall((DOCS / page).read_text("utf-8"))]


def printed(code: str, names: dict[str, Any]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "tutorial", "exec"), names)
    return said.getvalue()


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    assert len(blocks("tutorial.md")) >= 8
    for code, output in blocks("tutorial.md"):
        found = printed(code, names)
        assert NUMBER.sub("0.0", found) == NUMBER.sub("0.0", output), code
        shares, told = (np.array(NUMBER.findall(text), float) for text in (found, output))
        np.testing.assert_allclose(shares, told, atol=0.1, err_msg=code)  # elsewhere a doubtful picture may fall over


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate(("labelled/cat/1", "labelled/cat/2", "labelled/dog/1", "pile/1", "pile/2")):
        path = tmp_path / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (90, 84), (40 * place, 120, 200 - 40 * place)).save(path)
    (code, _), *_ = blocks("classifier.md")
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 5
    lines = printed(code, {}).splitlines()
    assert [line.split()[0] for line in lines] == ["pile/1.jpg", "pile/2.jpg"]
    assert {line.split()[1] for line in lines} <= {"cat", "dog"}
