"""Tables that are opened in spreadsheets: no cell acts as a formula, and corrections are read back as they were."""

import csv
import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trident.errors import one_line
from trident.labelling.class_names import NONE
from trident.labelling.tables import COLUMNS, Row, as_csv, as_json, guarded, read_corrections, unguarded

STATIC = Path(__file__).parents[2] / "src" / "trident" / "web" / "static"
STARTS = "=+-@＝＋－＠"
NASTY = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "x;=1", 'x",=1', "a|@b", "'=1", "''-1", "＝1", "a\n=1", ";'-b"]
HARMLESS = ["", "a.jpg", "it's", "'quoted'", "a-b", "x = y", "pile/=1", "IMG -2.jpg", "caf\udce9"]
texts = st.text(st.sampled_from(list("ab'\"=+-@;,|\t\r\n .＝＠é")), max_size=8)


@pytest.mark.parametrize("text", NASTY)
def test_what_may_act_as_a_formula_gets_an_apostrophe(text: str) -> None:
    assert guarded(text) != text
    for separator in ';,|\t\r\n"':  # whichever of them a spreadsheet splits at
        assert not any(cell.startswith(tuple(STARTS)) for cell in guarded(text).split(separator))


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert guarded(text) == text == unguarded(text)


@given(text=texts)
@example(text="'=x")
def test_guarding_can_be_undone(text: str) -> None:
    assert unguarded(guarded(text)) == text


@given(path=texts.filter(bool), right=texts.map(lambda text: " ".join(text.split())).filter(bool))
def test_corrections_are_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, path: str, right: str
) -> None:
    row = Row(path, right, 1.0, "", 0.0, right, False, None, "", right, {right: 1.0})
    table = tmp_path_factory.mktemp("table") / "labels.csv"
    text = as_csv([row], (right,), every=True)
    table.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_corrections(table)[0] == {path: right}
    head, cells = csv.reader(io.StringIO(text, newline=""))
    assert not any(cell.startswith(tuple(STARTS)) for cell in (*head, *cells))


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js here")
def test_the_page_does_the_same() -> None:
    """test_web_none.py compares whole tables in a browser."""
    code = f"import {{ guarded }} from {json.dumps((STATIC / 'spreadsheets.js').as_uri())};"
    inputs = [text for text in (*NASTY, *HARMLESS) if text.isprintable() or text.isascii()]
    code += f"console.log(JSON.stringify({json.dumps(inputs)}.map(guarded)))"
    call = ["node", "--input-type=module", "-e", code]
    answer = subprocess.run(call, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [guarded(text) for text in inputs]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("two\nlines\r", r"two\nlines\r"),
        ("bell\x07\x9b2J", r"bell\x07\x9b2J"),
        ("gpj\u202e.exe", r"gpj\u202e.exe"),
        ("caf\udce9", r"caf\xe9"),
        ("Grüße, 例 (1).jpg", "Grüße, 例 (1).jpg"),
    ],
)
def test_names_cannot_act_on_a_terminal(name: str, shown: str) -> None:
    assert one_line(name) == shown


def test_corrections_are_read_as_spreadsheets_write_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfpath,correction\r\na.png,red\r\nb.png\r\nc.png,\r\n")
    assert read_corrections(tmp_path / "a.csv")[0] == {"a.png": "red"}
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfpath;label;correction\r\na,b.png;blue;red\r\n")
    assert read_corrections(tmp_path / "a.csv")[0] == {"a,b.png": "red"}
    (tmp_path / "a.csv").write_text('path;correction;"p(cat, big)"\na.png;None of These;0.5\n')
    assert read_corrections(tmp_path / "a.csv")[0] == {"a.png": NONE}
    (tmp_path / "a.csv").write_text("path\tcorrection\na.png\tred\n")
    assert read_corrections(tmp_path / "a.csv")[0] == {"a.png": "red"}
    for content in ("sep=,\r\npath,correction\r\na.png,red\r\n", '"sep=;";\nPATH ; Correction\na.png; red \n'):
        (tmp_path / "a.csv").write_text(content)
        assert read_corrections(tmp_path / "a.csv")[0] == {"a.png": "red"}
    (tmp_path / "a.csv").write_text(f"path|label|correction\na.png|{'x' * 200_000}|red\nb.png\nc.png|||||\n")
    assert read_corrections(tmp_path / "a.csv")[0] == {"a.png": "red"}
    for encoding in ("utf-16-le", "utf-16-be"):
        (tmp_path / "a.csv").write_text("\ufeffpath\tcorrection\ncafé.png\tred\n", encoding)
        assert read_corrections(tmp_path / "a.csv")[0] == {"café.png": "red"}
    (tmp_path / "b.csv").write_bytes(b"path,correction\ncaf\xe9.png,red\n")
    assert read_corrections(tmp_path / "b.csv")[0] == {os.fsdecode(b"caf\xe9.png"): "red"}


def test_csv_and_json_tables_are_read_alike(tmp_path: Path) -> None:
    rows = [
        Row("=a.png", "", 0.5, "", 0.1, "red", True, None, "id-1e5", NONE, {"red": 1.0}),
        Row("caf\udce9.png", "red", 0.5, "", 0.1, "red", False, 1.0, "", "red", {"red": 1.0}),
        Row("c.png", "red", 0.5, "", 0.1, "red", False, 1.0, "id-3", "", {"red": 1.0}),
    ]
    for place, text in enumerate((as_csv(rows, ("red",), every=True), as_json(rows, ("red",), True, {}))):
        (tmp_path / str(place)).write_text(text, errors="surrogateescape")
        found = read_corrections(tmp_path / str(place))
        assert found.labels == {"=a.png": NONE, "caf\udce9.png": "red"} and found.marks == {"=a.png": "id-1e5"}
        assert found.columns - {"p(red)"} == set(COLUMNS)


def test_a_million_corrections_are_read_in_seconds(tmp_path: Path) -> None:
    """A hundredth of them, in ten times their share of the 3 seconds that are promised."""
    lines = (f"pile/{place}.jpg,a,0.9312,b,0.0312,a,,0.913,id-{place},class {place % 50}\n" for place in range(10_000))
    head = "path,label,probability,runner_up,runner_up_probability,best_guess,none_of_these,typicality,picture,"
    (tmp_path / "a.csv").write_text(f"{head}correction\n" + "".join(lines))
    began = time.process_time()
    labels, marks, *_ = read_corrections(tmp_path / "a.csv")
    assert len(labels) == len(marks) == 10_000
    assert time.process_time() - began < 0.3
