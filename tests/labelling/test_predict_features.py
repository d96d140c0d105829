"""`trident predict`, `fit` and `suggest` with frozen features: real files, and real processes where they die."""

import csv
import functools
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ablation_grids import Answer
from commands import assert_one_line_error, run_trident
from stand_in_backbone import EVIDENCE, NAME, SUPPORT, picture, save_pictures, save_support_and_pile
from trident.labelling.class_names import NONE
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.tables import rows_of as rows_of_table

COLUMNS = [
    "path",
    "label",
    "probability",
    "runner_up",
    "runner_up_probability",
    "best_guess",
    "none_of_these",
    "typicality",
    "picture",
    "correction",
]
Here = Callable[..., Answer]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes with two labelled pictures each, and a pile of fifteen. The cache is empty."""
    save_support_and_pile(tmp_path)
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def predict(trident_here: Here) -> Here:
    return functools.partial(trident_here, "predict", "--backbone", NAME, "--query", "pile")


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def true_class(path: str) -> str:
    return Path(path).name.split("-")[0]


def white(folder: Path, n: int = 1) -> list[str]:
    """Pictures that belong to no class."""
    names = [f"white-{place}.png" for place in range(n)]
    for place, name in enumerate(names):
        Image.fromarray(np.full((30, 30, 3), 255 - 5 * place, np.uint8)).save(folder / name)
    return names


# Tables


@pytest.mark.slow
def test_a_pile_is_labelled_in_a_process_of_its_own(folders: Path) -> None:
    """With the default backbone, as the README has it."""
    call = ("predict", "--support", "support", "--query", "pile", "--all")
    found = run_trident(folders, *call)
    assert found.returncode == 0, found.stderr
    rows = rows_of(found.stdout)
    assert list(rows[0]) == [*COLUMNS, "p(blue)", "p(green)", "p(red)"]
    assert [row["path"] for row in rows] == sorted(f"pile/{colour}-{i:03d}.png" for colour in SUPPORT for i in range(5))
    assert np.mean([true_class(row["path"]) == row["label"] for row in rows]) >= 0.9
    for row in rows:
        shares = [float(row[f"p({name})"]) for name in SUPPORT]
        assert sum(shares) == pytest.approx(1, abs=2e-3)
        assert float(row["probability"]) == max(shares) >= float(row["runner_up_probability"])
        assert float(row["typicality"]) > 0.65 and row["none_of_these"] == row["correction"] == ""
    said = found.stderr.splitlines()
    assert said[0] == f"features of efficientnet-lite0, {EVIDENCE}"
    assert re.fullmatch(
        r"about \d+ % of these labels will be right \(\d+ to \d+ %, judged by leaving out 6 .*\)", said[1]
    )
    assert (folders / "cache" / "features.sqlite").stat().st_mode & 0o077 == 0
    again = run_trident(folders, *call)
    assert (again.stdout, again.returncode) == (found.stdout, 0)


def test_csv_json_and_files_say_the_same(predict: Here, folders: Path) -> None:
    white(folders / "pile", 2)
    text = predict("--support", "support").stdout
    rows = rows_of(text)
    assert list(rows[0]) == COLUMNS
    assert [row["path"] for row in rows if row["none_of_these"] == "yes"] == ["pile/white-0.png", "pile/white-1.png"]
    written = predict("--support", "support", "--out", "labels.csv")
    assert (folders / "labels.csv").read_text() == text
    assert "labelled 15 of 17 pictures, see labels.csv; none of these classes: 2" in written.stderr
    result = json.loads(predict("--support", "support", "--json", "--all").stdout)
    assert result["classes"] == sorted(SUPPORT) and result["skipped"] == []
    for row, one in zip(rows, result["pictures"], strict=True):
        assert one["path"] == row["path"]
        assert (one["label"] or "") == row["label"]
        assert one["best_guess"] == row["best_guess"] in SUPPORT
        assert one["none_of_these"] is (row["none_of_these"] == "yes") is (row["label"] == "")
        assert f"{one['typicality']:.3f}" == row["typicality"]
        assert f"{one['probabilities'][one['best_guess']]:.4f}" == row["probability"]


def test_least_sure_first(predict: Here, folders: Path) -> None:
    white(folders / "pile")
    rows = rows_of(predict("--support", "support", "--least-sure-first").stdout)
    assert true_class(rows[0]["path"]) == "white"
    ordered = [(row["none_of_these"] != "yes", float(row["probability"])) for row in rows]
    assert ordered == sorted(ordered)


# Corrections


def corrected(folders: Path, predict: Here, corrections: dict[str, str]) -> Path:
    """The table of the pile, with corrections written into it."""
    table = rows_of(predict("--support", "support").stdout)
    for row in table:
        row["correction"] = corrections.get(row["path"], "")
    with (folders / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return folders / "table.csv"


def test_corrected_pictures_become_labelled_ones(predict: Here, folders: Path) -> None:
    (junk,) = white(folders / "pile")
    save_pictures(folders / "pile", {"yellow": 6})
    right = {"pile/yellow-000.png": "yellow", "pile/red-001.png": " red ", f"pile/{junk}": NONE}
    table = corrected(folders, predict, right)
    before = {row["path"]: row for row in rows_of(table.read_text())}
    assert "yellow" not in {row["label"] for row in before.values()}
    found = predict("--support", "support", "--corrections", table, "--all", "--out", "again.csv")
    assert found.returncode == 0, found.stderr
    rows = rows_of((folders / "again.csv").read_text())
    assert [row["path"] for row in rows] == sorted(before)  # all are in the table still
    by_path = {row["path"]: row for row in rows}
    assert [key for key in rows[0] if key.startswith("p(")] == ["p(blue)", "p(green)", "p(red)", "p(yellow)"]
    for path, wanted in right.items():
        row = by_path[path]
        assert row["correction"] == wanted.strip()
        assert row["none_of_these"] == ("yes" if wanted == NONE else "")
        assert row["label"] == ("" if wanted == NONE else wanted.strip())
        assert row["probability"] == ("0.0000" if wanted == NONE else "1.0000")
    others = [row for row in rows if row["path"] not in right]
    assert all(row["label"] == true_class(row["path"]) for row in others)  # the new class is found among them
    assert "labelled 21 of 22 pictures" in found.stderr
    # The table that it wrote can be read again, and nothing changes.
    assert (
        predict("--support", "support", "--corrections", "again.csv", "--all").stdout
        == (folders / "again.csv").read_text()
    )


def test_pictures_that_were_moved_since_are_no_longer_corrected(predict: Here, folders: Path) -> None:
    table = corrected(folders, predict, {"pile/red-001.png": "blue", "pile/green-000.png": "none_of_these"})
    (folders / "pile" / "red-001.png").rename(folders / "support" / "red" / "moved.png")
    found = predict("--support", "support", "--corrections", table)
    assert found.returncode == 0, found.stderr
    assert f"{table} corrects pile/red-001.png, not in the pile any more: left out" in found.stderr
    assert f"corrections taken from {table}: 1\n" in found.stderr  # and none_of_these is no new class
    rows = {row["path"]: row for row in rows_of(found.stdout)}
    assert rows["pile/green-000.png"]["none_of_these"] == "yes" and len(rows) == 14


def test_a_table_without_corrections_says_where_to_write_them(predict: Here, folders: Path) -> None:
    found = predict("--support", "support", "--corrections", corrected(folders, predict, {}))
    assert found.returncode == 0 and "has no corrections: write the right class into the column" in found.stderr


def test_a_table_with_corrections_is_not_replaced_by_one_without_them(predict: Here, folders: Path) -> None:
    table = corrected(folders, predict, {"pile/red-001.png": "blue"})
    before = table.read_text()
    lost = ["corrections that would be lost (1, the first for pile/red-001.png)", "--corrections table.csv"]
    assert_one_line_error(predict("--support", "support", "--out", "table.csv"), *lost)
    assert table.read_text() == before
    for _ in range(2):  # the second time, the table is the one that the first wrote
        found = predict("--support", "support", "--corrections", "table.csv", "--out", "table.csv")
        assert found.returncode == 0, found.stderr


def test_a_corrected_picture_that_was_moved_is_left_out(predict: Here, folders: Path) -> None:
    moved, kept = "pile/red-000.png", "pile/red-001.png"
    table = corrected(folders, predict, {moved: "green", kept: "green"})
    (folders / moved).rename(folders / "support" / "green" / "red-000.png")
    call = ("--support", "support", "--corrections", table, "--out")
    found = predict(*call, table)
    assert found.returncode == 2 and f"would be lost (1, the first for {moved})" in found.stderr
    found = predict(*call, "new.csv")
    assert found.returncode == 0 and f"corrects {moved}, not in the pile any more: left out" in found.stderr
    rows = {row["path"]: row for row in rows_of((folders / "new.csv").read_text())}
    assert moved not in rows and rows[kept]["label"] == "green"


def test_corrections_with_a_saved_classifier(predict: Here, trident_here: Here, folders: Path) -> None:
    save_pictures(folders / "pile", {"yellow": 5})
    table = corrected(folders, predict, {"pile/yellow-000.png": "yellow"})
    assert trident_here("fit", "--support", "support", "--out", "c.trident", "--backbone", NAME).returncode == 0
    rows = rows_of(predict("--model", "c.trident", "--corrections", table).stdout)
    assert [row["label"] for row in rows] == [true_class(row["path"]) for row in rows]


def test_corrections_work_with_conv4_too(trident_here: Here, folders: Path) -> None:
    call = ("predict", "--backbone", "conv4", "--support", "support", "--query", "pile", "--out", "table.csv")
    assert trident_here(*call).returncode == 0
    lines = (folders / "table.csv").read_text().splitlines()
    assert lines[1].startswith("pile/blue-000.png,") and lines[1].endswith(",")
    (folders / "table.csv").write_text("\n".join([lines[0], lines[1] + "teal", *lines[2:]]))
    rows = rows_of(trident_here(*call[:-2], "--corrections", "table.csv", "--all").stdout)
    assert rows[0]["label"] == "teal" and "p(teal)" in rows[0]
    assert len(rows) == 15


def test_all_pictures_may_be_corrected(predict: Here, folders: Path) -> None:
    every = {str(path.relative_to(folders)): "green" for path in (folders / "pile").iterdir()}
    rows = rows_of(predict("--support", "support", "--corrections", corrected(folders, predict, every)).stdout)
    assert [row["label"] for row in rows] == ["green"] * 15


NOT_REPLACED = {
    "conflicting rows": (b"path,correction\na,red\na,blue\n", "twice: to 'red' and to 'blue'"),
    "another table": (b"name,price\nbread,3\n", "no columns 'path' and 'correction'"),
    "no table": (b"Dear Sir,\nyours.\n", "no columns 'path' and 'correction'"),
    "quotation marks that stay open": (b'path,correction\na,red\n"b,red\n', "not a whole one (unexpected end of data)"),
    "a comma too many": (b"path,correction\na,b.png,red\n", "line 2 has more cells"),
    "two columns": (b"path,correction,Correction\na,red,blue\n", "one of each"),
    "UTF-16": ("path\tcorrection\na\tred\n".encode("utf-16"), "would be lost (1, the first for a)"),
    "half of UTF-16": ("path\tcorrection\na\tred\n".encode("utf-16")[:-1], "not a whole one"),
    "no class": (b"path,correction\na,\x07\n", "a class cannot be called"),
    "JSON": (b'{"pictures": [{"path": "a", "correction": "red"}]}', "would be lost (1, the first for a)"),
    "half of JSON": (b'{"pictures": [{"path": "a"', "not a whole one"),
    "other JSON": (b'{"a": 1}', "cannot be read as a table of 'trident predict'"),
    "JSON with a number": (b'{"pictures": [{"path": "a", "correction": 3}]}', "other values than texts"),
    "JSON with zero": (b'{"pictures": [{"path": "a", "correction": 0}]}', "other values than texts"),
    "JSON with false": (b'{"pictures": [{"path": "a", "correction": false}]}', "other values than texts"),
    "notes": (b"path,correction,notes\na,,ask Ann\n", "a column that would be lost, 'notes'"),
    "a column without a name": (b"path,correction,\na,,ask Ann\n", "a column that would be lost, ''"),
    "notes in JSON": (b'{"pictures": [{"path": "a", "notes": "ask Ann"}]}', "a column that would be lost, 'notes'"),
}


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_what_is_no_table_or_loses_corrections_is_not_replaced(predict: Here, folders: Path, name: str) -> None:
    content, words = NOT_REPLACED[name]
    for table in ("table.csv", "table.json"):
        (folders / table).write_bytes(content)
        assert_one_line_error(predict("--support", "support", "--out", table), table, words, "another --out")
        assert (folders / table).read_bytes() == content


@pytest.mark.parametrize("table", ["table.csv", "table.json"])
def test_tables_of_all_classes_and_of_older_versions_are_replaced(predict: Here, folders: Path, table: str) -> None:
    (folders / table).write_text("path,label,p(red),correction\n")
    for _ in range(2):  # the second time, it has the probabilities of all classes
        found = predict("--support", "support", "--all", "--out", table)
        assert found.returncode == 0, found.stderr


def test_what_is_said_of_another_file_is_short(predict: Here, folders: Path) -> None:
    (folders / "q.csv").write_text("name,price\nbread,3\n")
    said = (
        "q.csv cannot be read as a table of 'trident predict': it has no columns 'path' and 'correction', one of each"
    )
    found = predict("--support", "support", "--out", "q.csv")
    assert found.stderr.strip().endswith(f"{said}; so it is kept: give another --out")
    assert found.stderr.count("q.csv") == 1


def test_a_narrower_pile_does_not_drop_the_other_corrections(predict: Here, folders: Path) -> None:
    table = corrected(folders, predict, dict.fromkeys(("pile/red-000.png", "pile/red-001.png"), "green"))
    before = table.read_text()
    (folders / "few.txt").write_text("pile/red-000.png\npile/red-002.png\n")
    found = predict("--support", "support", "--query", "few.txt", "--corrections", table, "--out", table)
    assert found.returncode == 2 and "would be lost (1, the first for pile/red-001.png)" in found.stderr
    assert table.read_text() == before


def test_a_table_that_is_corrected_during_the_run_is_not_replaced(
    predict: Here, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = corrected(folders, predict, {})

    def slow(*arguments: Any) -> Any:
        table.write_text("path,correction\npile/red-000.png,green\n")
        return rows_of_table(*arguments)

    monkeypatch.setattr("trident.cli.predicting.rows_of", slow)
    found = predict("--support", "support", "--out", table)
    assert found.returncode == 2 and "would be lost (1, the first for pile/red-000.png)" in found.stderr
    assert "green" in table.read_text()


def test_corrections_of_another_pile_with_the_same_names(predict: Here, folders: Path) -> None:
    names = [f"pile/red-00{place}.png" for place in range(2)]
    table = corrected(folders, predict, dict.fromkeys(names, "green"))
    assert predict("--support", "support", "--corrections", table).returncode == 0
    for place, name in enumerate(names):
        picture("blue", 3000 + place).save(folders / name)
    found = predict("--support", "support", "--corrections", table)
    words = [f"table.csv corrects another picture than {names[0]}", "2 such pictures", "clear its 'picture' cells"]
    assert_one_line_error(found, *words)
    (folders / "old.csv").write_text(f"path,correction\n{names[0]},green\n{names[1]},green\n")
    found = predict("--support", "support", "--corrections", "old.csv", "--out", table)
    assert found.returncode == 2 and f"would be lost (2, the first for {names[0]})" in found.stderr
    assert "old.csv has no column 'picture', so it cannot be checked that these are the same pictures" in found.stderr
    marks = {row["picture"] for row in rows_of(table.read_text())}
    table.write_text(re.sub("|".join(marks), "", table.read_text()))
    found = predict("--support", "support", "--corrections", table)
    assert found.returncode == 0 and "has no column" not in found.stderr


def test_the_same_picture_in_two_classes_is_refused(predict: Here, trident_here: Here, folders: Path) -> None:
    first = "support/red/red-000.png"
    shutil.copy(first, "pile/copy.png")
    for name in ("blue", NONE):
        (folders / "right.csv").write_text(f"path,correction\npile/copy.png,{name}\n")
        found = predict("--support", "support", "--corrections", "right.csv")
        said = f"{first} in class 'red' and pile/copy.png in class '{name}' are the same picture"
        assert found.returncode == 2 and said in found.stderr
    shutil.copy(first, "pile/again.png")
    (folders / "two.csv").write_text("path,correction\npile/again.png,red\npile/copy.png,blue\n")
    assert trident_here("fit", "--support", "support", "--out", "c.trident", "--backbone", NAME).returncode == 0
    found = predict("--model", "c.trident", "--corrections", "two.csv")
    said = "pile/again.png in class 'red' and pile/copy.png in class 'blue' are the same picture"
    assert found.returncode == 2 and said in found.stderr
    shutil.copy(first, "support/red/again.png")
    (folders / "right.csv").write_text("path,correction\npile/copy.png,red\n")
    assert predict("--support", "support", "--corrections", "right.csv").returncode == 0


@pytest.mark.parametrize(
    ("names", "number"),
    [(("caf\u00e9", "cafe\u0301"), "one class"), (("red", "red "), "one class"), (("Red", "red"), "two classes")],
)
def test_folders_whose_names_look_alike_are_named(
    predict: Here, folders: Path, names: tuple[str, str], number: str
) -> None:
    Path("support/red").rename("old")
    for place, name in enumerate(names):
        Path("support", name).mkdir()
        Path("old", f"red-00{place}.png").rename(Path("support", name, "0.png"))
    found = predict("--support", "support", "--all")
    one, other = sorted(names)
    assert f"support: the folders {one!a} and {other!a} are {number}" in found.stderr
    columns = [column for column in rows_of(found.stdout)[0] if column.startswith("p(")]
    assert len(columns) == (3 if number == "one class" else 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("path,label\npile/red-000.png,red\n", ["no columns 'path' and 'correction'"]),
        ("", ["no columns 'path' and 'correction'"]),
        ("path,correction\npile/gone.png,red\n", ["pile/gone.png", "not in the pile", "--query"]),
        ("path,correction\npile/caf\udce9.png,red\n", ["not in the pile", "save the table as UTF-8"]),
        ("path,correction\npile/red-000.png,red\npile/caf\udce9.png,red\n", ["caf", "save the table as UTF-8"]),
        ("path,correction\npile/red-000.png,red\npile/red-000.png,blue\n", ["twice: to 'red' and to 'blue'"]),
        ("path,correction\npile/red-000.png,caf\udce9\n", ["cannot be called 'caf\\xe9'", "UTF-8"]),
        (None, ["cannot read", "nothing.csv"]),
    ],
)
def test_bad_corrections(predict: Here, folders: Path, content: str | None, words: list[str]) -> None:
    if content is not None:
        (folders / "nothing.csv").write_text(content, errors="surrogateescape")
    assert_one_line_error(predict("--support", "support", "--corrections", "nothing.csv"), *words)


def test_corrections_come_from_ordinary_files_only(predict: Here, folders: Path) -> None:
    os.mkfifo(folders / "fifo.csv")  # would wait for a writer
    for path in ("fifo.csv", "/dev/zero", "pile"):
        assert_one_line_error(predict("--support", "support", "--corrections", path), f"cannot read {path}")


# Saved classifiers and suggestions


def test_fit_and_predict_with_the_file(predict: Here, trident_here: Here, folders: Path) -> None:
    made = trident_here("fit", "--support", "support", "--out", "colours.trident", "--backbone", NAME)
    assert made.returncode == 0, made.stderr
    assert "wrote colours.trident: 3 classes from 6 pictures" in made.stderr
    from_file = predict("--model", "colours.trident", "--all")
    assert from_file.stdout == predict("--support", "support", "--all").stdout
    assert "colours.trident: features of" in from_file.stderr and "3 classes" in from_file.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--support", "support", "--out", "c.txt"], ["must end in .trident"]),
        (["--support", "support", "--out", "nowhere/c.trident"], ["the folder nowhere does not exist"]),
        (["--support", "nowhere", "--out", "c.trident"], ["no such folder"]),
        (["--support", "support", "--out", "c.trident", "--backbone", "resnet"], ["no backbone is called 'resnet'"]),
        (["--support", "broken", "--out", "c.trident", "--backbone", NAME], ["0.png", "not an image"]),
        (["--support", "support", "--out", "c.trident", "--query", "pile"], ["--corrections TABLE and --query PILE"]),
    ],
)
def test_bad_fits(trident_here: Here, folders: Path, arguments: list[str], words: list[str]) -> None:
    for name in ("a", "b"):
        (folders / "broken" / name).mkdir(parents=True)
        (folders / "broken" / name / "0.png").write_text(name)
    assert_one_line_error(trident_here("fit", *arguments), *words)
    assert not (folders / "c.trident").exists()


def test_corrected_pictures_count_in_fits_and_suggestions(predict: Here, trident_here: Here, folders: Path) -> None:
    save_pictures(folders / "pile", {"yellow": 5})
    right = {"pile/yellow-000.png": "yellow", "pile/yellow-001.png": NONE}
    with_table = ("--support", "support", "--corrections", corrected(folders, predict, right), "--query", "pile")
    made = trident_here("fit", *with_table, "--out", "c.trident", "--backbone", NAME)
    assert made.returncode == 0 and "wrote c.trident: 4 classes from 7 pictures" in made.stderr, made.stderr
    assert "corrections taken from" in made.stderr and ": 2; new classes: yellow" in made.stderr
    assert trident_here("fit", "--support", "support", "--out", "few.trident", "--backbone", NAME).returncode == 0
    with_models = [("--model", f"{name}.trident", *with_table[2:]) for name in ("c", "few")]
    expected = predict(*with_table, "--all").stdout
    for source in with_models:  # whether the classifier knows the corrected pictures or not: none counts twice
        assert predict(*source, "--all").stdout == expected
    new = "pile/yellow-004.png"
    for source in (with_table, *with_models):
        found = trident_here("suggest", "--backbone", NAME, *source, "-n", 100, "--json")
        assert found.returncode == 0, found.stderr
        suggested = {entry["path"]: entry["best_guess"] for entry in json.loads(found.stdout)}
        assert not suggested.keys() & right.keys() and suggested[new] == "yellow"
    every = {str(path.relative_to(folders)): "green" for path in (folders / "pile").iterdir()}
    nothing_left = trident_here(
        "suggest", *with_table[:2], "--query", "pile", "--corrections", corrected(folders, predict, every)
    )
    assert nothing_left.returncode == 2 and "corrects every picture of --query pile" in nothing_left.stderr


@pytest.mark.parametrize("command", [["fit", "--out", "c.trident"], ["suggest", "--query", "pile"]])
def test_conv4_is_not_enough(trident_here: Here, folders: Path, command: list[str]) -> None:
    found = trident_here(*command, "--support", "support", "--backbone", "conv4")
    assert found.returncode == 2
    last = found.stderr.strip().splitlines()[-1]
    assert "omit --backbone conv4" in last


@pytest.mark.parametrize("command", ["predict", "suggest"])
def test_labelled_pictures_come_from_one_place(trident_here: Here, folders: Path, command: str) -> None:
    assert_one_line_error(trident_here(command, "--query", "pile"), "--support DIR, or --model FILE")
    both = ("--support", "support", "--model", "c.trident")
    assert_one_line_error(trident_here(command, "--query", "pile", *both), "--support DIR and --model FILE exclude")


def test_suggestions(trident_here: Here, folders: Path) -> None:
    """Doubtful pictures come first: each stands for others like it, and is not like the one before."""
    save_pictures(folders / "new", dict.fromkeys(SUPPORT, 1), first=300)
    for place in range(4):
        for one, other in (("red", "green"), ("green", "blue")):
            mixed = Image.blend(picture(one, place), picture(other, place), 0.5)
            mixed.save(folders / "new" / f"{one}+{other}-{place}.png")
    (folders / "new" / "broken.png").write_bytes(b"no picture")
    call = ("suggest", "--backbone", NAME, "--support", "support", "--query", "new")
    found = trident_here(*call, "-n", 4)
    assert found.returncode == 2
    assert [line for line in found.stderr.splitlines() if "skipped" in line] == [
        "trident: skipped new/broken.png: it is not an image in a known format"
    ]
    lines = found.stdout.splitlines()
    assert len(lines) == 4
    assert {true_class(line.split("\t")[0]) for line in lines[:2]} == {"red+green", "green+blue"}
    assert all("perhaps" in line for line in lines)
    entries = json.loads(trident_here(*call, "-n", 100, "--json").stdout)
    assert len({entry["path"] for entry in entries}) == 11
    assert [entry["path"] for entry in entries[:4]] == [line.split("\t")[0] for line in lines]
    assert trident_here("fit", "--support", "support", "--out", "c.trident", "--backbone", NAME).returncode == 0
    assert trident_here(*call[:3], "--model", "c.trident", "--query", "new", "-n", 4).stdout == found.stdout
    assert_one_line_error(trident_here(*call, "-n", 0), "-n")


# The cache


def test_without_a_cache_nothing_is_kept(predict: Here, folders: Path) -> None:
    found = predict("--support", "support", "--no-cache")
    assert found.returncode == 0
    assert not (folders / "cache").exists()
    assert predict("--support", "support").stdout == found.stdout
    assert FeatureCache(folders / "cache").size()[0] == 21


def damage(folder: Path) -> None:
    folder.mkdir()
    (folder / "features.sqlite").write_bytes(b"this is no database, whatever it is called" * 100)


def no_folder(folder: Path) -> None:
    folder.write_bytes(b"a file in the folder's place")


@pytest.mark.parametrize(("spoil", "words"), [(damage, "was damaged"), (no_folder, "features are not kept: the")])
def test_a_cache_that_cannot_be_used_is_one_line_and_no_more(
    predict: Here, folders: Path, spoil: Callable[[Path], None], words: str
) -> None:
    expected = predict("--support", "support", "--no-cache")
    spoil(folders / "cache")
    found = predict("--support", "support")
    assert (found.returncode, found.stdout) == (0, expected.stdout)
    told = set(found.stderr.splitlines()) - set(expected.stderr.splitlines())
    assert len(told) == 1
    assert words in told.pop()


def test_damaged_features_in_the_cache_are_computed_again(predict: Here, folders: Path) -> None:
    import sqlite3

    expected = predict("--support", "support").stdout
    with sqlite3.connect(folders / "cache" / "features.sqlite") as database:
        database.execute("UPDATE features SET content = zeroblob(length(content)) WHERE id % 2")
    assert predict("--support", "support").stdout == expected
