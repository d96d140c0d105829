"""`trident sort`: a table of `trident predict` and pictures on disk in, class folders out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from ablation_grids import Answer
from commands import assert_one_line_error
from trident.data.images import ImageFile
from trident.labelling.tables import mark_of

SORT = ("sort", "labels.csv", "--to", "sorted")
Here = Callable[..., Answer]
Rows = dict[str, tuple[str, str]]  # label and correction of each picture, by path


@pytest.fixture
def pile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Eight pictures, two of which have no class, in two folders that have two names in common; and their table."""
    rows: Rows = {}
    for place, label in enumerate(["cat", "dog", "", "cat", "dog", "", "cat", "dog"]):
        path = tmp_path / "pile" / ("deeper" if place > 5 else "") / f"{place % 6}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * place, 9, 9)).save(path)
        rows[str(path.relative_to(tmp_path))] = (label, "")
    monkeypatch.chdir(tmp_path)
    write(rows)
    return rows


def write(rows: Rows, table: Path = Path("labels.csv"), marks: bool = True) -> None:
    lines = [",".join(["path", "label", "correction", *(["picture"] if marks else [])])]
    for path, row in rows.items():
        lines.append(",".join([path, *row, *([mark_of(ImageFile(Path(path)))] if marks else [])]))
    table.write_text("\n".join([*lines, ""]))


def tree(folder: str = "sorted") -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("move", [[], ["--move"]])
def test_sorting_is_announced_first_and_writes_over_nothing(trident_here: Here, pile: Rows, move: list[str]) -> None:
    before, verb = tree("."), "move" if move else "copy"
    announced = trident_here(*SORT, *move)
    assert announced.returncode == 0, announced.stderr
    assert f"nothing was done; --yes would {verb} 6 pictures" in announced.stderr
    assert f"would {verb} pile/deeper/0.png to sorted/cat/0-2.png" in announced.stderr
    assert tree(".") == before
    Path("sorted/dog").mkdir(parents=True)
    Path("sorted/dog/1.png").write_bytes(b"mine")
    assert_one_line_error(trident_here(*SORT, *move, "--yes"), "sorted/dog/1.png is not in labels.csv", "--add")
    done = trident_here(*SORT, *move, "--yes", "--add")
    assert done.returncode == 0, done.stderr
    assert tree() == {"cat/0.png", "cat/0-2.png", "cat/3.png", "dog/1.png", "dog/1-2.png", "dog/1-3.png", "dog/4.png"}
    assert Path("sorted/dog/1.png").read_bytes() == b"mine"
    assert tree("pile") == ({"2.png", "5.png"} if move else {path.removeprefix("pile/") for path in pile})
    again = trident_here(*SORT, *move, "--yes", "--add")
    assert (again.returncode, len(tree())) == (0, 7), again.stderr
    assert "0 pictures into sorted; 6 were there already" in again.stderr


def test_corrections_count_and_none_of_these_stays(trident_here: Here, pile: Rows) -> None:
    write(pile | {"pile/0.png": ("cat", "dog"), "pile/1.png": ("dog", "None of these"), "pile/2.png": ("", "wren")})
    assert trident_here(*SORT, "--yes").returncode == 0
    assert tree() == {"cat/3.png", "cat/0.png", "dog/0.png", "dog/1.png", "dog/4.png", "wren/2.png"}


def test_json_tables_are_read_too(trident_here: Here, pile: Rows) -> None:
    pictures = [{"path": path, "label": label or None, "correction": None} for path, (label, _) in pile.items()]
    Path("labels.json").write_text(json.dumps({"classes": ["cat", "dog"], "pictures": pictures, "skipped": []}))
    done = trident_here("sort", "labels.json", "--to", "sorted", "--yes")
    assert done.returncode == 0 and len(tree()) == 6
    assert "labels.json has no column 'picture'" in done.stderr


@pytest.mark.parametrize("move", [[], ["--move"]])
def test_a_correction_after_sorting_is_told_and_moves_nothing_back(
    trident_here: Here, pile: Rows, move: list[str]
) -> None:
    marks = Path("labels.csv").read_text()
    assert trident_here(*SORT, *move, "--yes").returncode == 0
    Path("labels.csv").write_text(marks.replace("pile/3.png,cat,,", "pile/3.png,cat,dog,"))
    found = trident_here(*SORT, *move, "--yes")
    assert found.returncode == 0, found.stderr
    assert "sorted under another label than now: 1, the first is sorted/cat/3.png; they stay there" in found.stderr
    assert ("dog/3.png" in tree()) is (not move)


def test_only_the_pictures_that_were_labelled_are_sorted(trident_here: Here, pile: Rows) -> None:
    Image.new("RGB", (8, 8), (1, 2, 3)).save("pile/0.png")
    Path("pile/1.png").unlink()
    found = trident_here(*SORT, "--move", "--yes")
    assert found.returncode == 2
    assert "moved 4 pictures into sorted" in found.stderr
    assert "trident: pile/0.png is another picture than the one that was labelled" in found.stderr
    assert "trident: pile/1.png: it is no longer there" in found.stderr
    assert Path("pile/0.png").exists()


def test_an_interrupted_move_goes_on(trident_here: Here, pile: Rows) -> None:
    """Two pictures are in their place already; one has a name there but not yet lost the old one."""
    Path("sorted/cat").mkdir(parents=True)
    shutil.move("pile/0.png", "sorted/cat/0.png")
    Path("sorted/cat/3.png").hardlink_to("pile/3.png")
    found = trident_here(*SORT, "--move", "--yes")
    assert found.returncode == 0, found.stderr
    assert "moved 5 pictures into sorted; 1 were there already" in found.stderr
    assert tree("pile") == {"2.png", "5.png"} and len(tree()) == 6


def test_a_picture_that_cannot_be_moved_does_not_stop_the_others(trident_here: Here, pile: Rows) -> None:
    Path("sorted").mkdir()
    Path("sorted/cat").write_bytes(b"a file where a folder is needed")
    found = trident_here(*SORT, "--move", "--yes")
    assert found.returncode == 2
    assert sum(line.startswith("trident: cannot write pile/") for line in found.stderr.splitlines()) == 3
    assert "moved 3 of 6 pictures into sorted" in found.stderr.splitlines()
    assert len(tree("pile")) == 5


def test_pictures_do_not_come_among_those_labelled_by_hand(trident_here: Here, pile: Rows) -> None:
    """Also where a folder is a link. Pictures of an earlier pile are such files, too, so it can be allowed."""
    Path("labelled/cat").mkdir(parents=True)
    Path("labelled/cat/tom.png").write_bytes(b"by hand")
    Path("links").mkdir()
    Path("links/cat").symlink_to(Path("labelled/cat").resolve())
    for folder in ("labelled", "links"):
        found = trident_here("sort", "labels.csv", "--to", folder, "--yes")
        assert_one_line_error(found, f"{folder}/cat/tom.png is not in labels.csv", "--add")
    assert tree("labelled") == {"cat/tom.png"}
    assert trident_here("sort", "labels.csv", "--to", "labelled", "--yes", "--add").returncode == 0
    assert len(tree("labelled")) == 7


def test_a_pile_is_sorted_in_place_and_what_is_in_class_folders_stays(trident_here: Here, pile: Rows) -> None:
    places = {"2.png", "5.png", "cat/0.png", "cat/0-2.png", "cat/3.png", "dog/1.png", "dog/1-2.png", "dog/4.png"}
    for done in ("moved 6 pictures", "moved 0 pictures into pile; 6 were there already"):
        found = trident_here("sort", "labels.csv", "--to", "pile", "--move", "--yes")
        assert done in found.stderr and tree("pile") == places
    Path("labels.csv").write_text("path,label,correction\npile/cat/0.png,dog,\npile/dog/4.png,cat,\n")
    corrected = trident_here("sort", "labels.csv", "--to", "pile", "--move", "--yes").stderr
    assert "sorted under another label than now: 2, the first is pile/cat/0.png; they stay there" in corrected
    assert tree("pile") == places


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("pile/0.png,../up,,\n", ["class '../up' cannot be the name of a folder in sorted"]),
        ("pile/0.png,cat,,\npile/0.png,dog,,\n", ["pile/0.png has two labels: 'cat' and 'dog'"]),
        ("nowhere.png,cat,,\n", ["no picture of labels.csv can be sorted (nowhere.png: it is no longer there)"]),
        ('"half', ["cannot be read as a table of 'trident predict'"]),
    ],
)
def test_bad_tables(trident_here: Here, pile: Rows, row: str, words: list[str]) -> None:
    Path("labels.csv").write_text(f"path,label,correction,picture\n{row}")
    assert_one_line_error(trident_here(*SORT, "--yes"), *words)
    assert not Path("sorted").exists()
