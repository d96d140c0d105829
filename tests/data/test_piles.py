"""Piles that are not folders of pictures: lists of paths, tar archives, Parquet files."""

import csv
import functools
import io
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ablation_grids import Answer
from commands import assert_one_line_error
from stand_in_backbone import NAME, picture, save_pictures, save_support_and_pile
from trident.data.images import ImageFile, Target, UnreadableImageError
from trident.data.piles import UniqueNames, find_pile, parquet_pictures, tar_pictures

Here = Callable[..., Answer]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_support_and_pile(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def predict(trident_here: Here) -> Here:
    return functools.partial(trident_here, "predict", "--backbone", NAME, "--support", "support", "--query")


def labels(answer: Answer) -> dict[str, tuple[str, str]]:
    """Label and probability, by the picture's name in the table."""
    return {row["path"]: (row["label"], row["probability"]) for row in csv.DictReader(io.StringIO(answer.stdout))}


def make_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def contents(folder: Path) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]


def test_a_list_is_labelled_as_the_folder_is(predict: Here, folders: Path) -> None:
    known = predict("pile")
    odd = folders / os.fsdecode(b"caf\xe9.png")
    picture("red", 77).save(odd)
    paths = [str(path.relative_to(folders)) for path in sorted((folders / "pile").iterdir())]
    (folders / "list.txt").write_text("\ufeff" + "\r\n".join(["", *paths, paths[0], " ", ""]))
    found = predict("list.txt")
    assert (found.returncode, found.stdout) == (0, known.stdout), found.stderr
    (folders / "list.txt").write_bytes("\n".join([*paths[::-1], "pile/gone.png", "pile"]).encode() + b"\ncaf\xe9.png")
    some = predict("list.txt", "--out", "table.csv")
    assert some.returncode == 2
    assert "skipped pile/gone.png: No such file or directory" in some.stderr
    assert "skipped pile: Is a directory" in some.stderr
    rows = (folders / "table.csv").read_bytes().splitlines()
    assert len(rows) == 1 + 15 + 1 and rows[-1].startswith(b"caf\xe9.png,red,")
    (folders / "list.txt").write_text("\n".join(paths))


def test_archives_are_labelled_as_the_folder_is_and_nothing_is_unpacked(
    predict: Here, trident_here: Here, folders: Path
) -> None:
    known = {Path(name).name: found for name, found in labels(predict("pile")).items()}
    inside = contents(folders / "pile")
    notes = [("notes.json", b"{}"), (".hidden.png", b"x"), ("__MACOSX/._a.png", b"x"), ("a.cls", b"3")]
    make_tar(folders / "shards" / "b.tar", [(f"./{name}", content) for name, content in inside[:7]] + notes)
    make_tar(folders / "shards" / "deep" / "a.tar", inside[7:], format=tarfile.GNU_FORMAT)
    before = sorted(folders.rglob("*"))
    found = predict("shards")
    assert found.returncode == 0, found.stderr
    assert {Path(name).name: values for name, values in labels(found).items()} == known
    assert next(iter(labels(found))) == f"shards/b.tar/{inside[0][0]}"
    assert sorted(folders.rglob("*")) == before
    assert labels(predict("shards/b.tar")).keys() == {f"shards/b.tar/{name}" for name, _ in inside[:7]}
    predict("shards", "--out", "labels.csv")
    refused = trident_here("sort", "labels.csv", "--to", "sorted", "--yes")
    assert_one_line_error(refused, "pictures must be files, not inside an archive", "shards")


def test_what_archives_may_hold(tmp_path: Path) -> None:
    png = io.BytesIO()
    picture("red", 1).save(png, "PNG")
    path = make_tar(tmp_path / "a.tar", [("../../up.png", png.getvalue()), ("/etc/x.png", png.getvalue())])
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("x.png"), io.BytesIO())
        entry = tarfile.TarInfo("x.png")
        entry.size = len(png.getvalue())
        archive.addfile(entry, io.BytesIO(png.getvalue()))
        for kind, name in ((tarfile.SYMTYPE, "link.png"), (tarfile.LNKTYPE, "hard.png"), (tarfile.DIRTYPE, "dir.png")):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        long = "l" * 150 + "/" + "n" * 150 + ".png"
        entry = tarfile.TarInfo(long)
        entry.size = len(png.getvalue())
        archive.addfile(entry, io.BytesIO(png.getvalue()))
    found, unread = tar_pictures([path])
    assert unread == {}
    assert [one.member for one in found] == ["../../up.png", "/etc/x.png", "x.png", "x.png#2", long]
    assert [Target(24, 3).decode(found[at]).shape for at in (0, 1, 3, 4)] == [(24, 24, 3)] * 4
    with pytest.raises(UnreadableImageError, match=r"a.tar/x.png: it is not an image"):
        Target(24, 3).decode(found[2])
    (tmp_path / "same.png").write_bytes(png.getvalue())
    assert found[0].key() == ImageFile(tmp_path / "same.png").key()
    assert pickle.loads(pickle.dumps(found)) == found


def test_damaged_archives_are_named_and_the_pictures_before_the_damage_kept(tmp_path: Path) -> None:
    save_pictures(tmp_path / "pile", {"red": 6})
    whole = make_tar(tmp_path / "whole.tar", contents(tmp_path / "pile"))
    content = whole.read_bytes()
    third = [one.offset for one in tar_pictures([whole])[0]][3] - tarfile.BLOCKSIZE  # the header of the fourth
    for name, damaged in {
        "cut": content[: third + tarfile.BLOCKSIZE + 10],
        "spoilt": content[:third] + b"\7" * tarfile.BLOCKSIZE + content[third + tarfile.BLOCKSIZE :],
    }.items():
        (tmp_path / f"{name}.tar").write_bytes(damaged)
        found, unread = tar_pictures([tmp_path / f"{name}.tar"])
        assert len(found) == 3
        assert "cannot be read to its end" in unread[str(tmp_path / f"{name}.tar")]
    (tmp_path / "no.tar").write_bytes(b"not a tar at all" * 100)
    (tmp_path / "b.tar.gz").write_bytes(b"")
    found, unread = tar_pictures([tmp_path / "no.tar", tmp_path / "b.tar.gz", tmp_path / "gone.tar"])
    assert found == [] and len(unread) == 3
    assert "decompress it" in unread[str(tmp_path / "b.tar.gz")]
    sources, _ = tar_pictures([whole])
    whole.write_bytes(content[: sources[-1].offset + 5])  # after it was looked through
    with pytest.raises(UnreadableImageError, match="the archive ends before"):
        sources[-1].key()


@pytest.mark.parametrize(("kind", "group"), [("plain", 4), ("records", 100), ("no names", 1)])
def test_parquet_files_are_labelled_as_the_folder_is(predict: Here, folders: Path, kind: str, group: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    known = labels(predict("pile"))
    inside = contents(folders / "pile")
    names, images = [name for name, _ in inside], [content for _, content in inside]
    records = [{"bytes": content, "path": name} for name, content in inside]
    columns = {
        "plain": {"name": names, "image": images, "thumbnail": [b"x"] * 15},
        "records": {"label": [0] * 15, "image": records},
        "no names": {"stuff": images, "width": [1.5] * 15},
    }[kind]
    (folders / "table").mkdir()
    parquet.write_table(pyarrow.table(columns), folders / "table" / "part-0.parquet", row_group_size=group)
    found = predict("table")
    assert found.returncode == 0, found.stderr
    expected = [str(at) for at in range(15)] if kind == "no names" else names
    assert [*labels(found)] == [f"table/part-0.parquet#{name}" for name in expected]
    assert [*labels(found).values()] == [*known.values()]


def test_odd_parquet_files(predict: Here, folders: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    png = (folders / "pile" / "red-000.png").read_bytes()
    (folders / "table").mkdir()
    rows = {"name": ["a", "a", None, "b"], "image": [png, None, png, b"no picture"]}
    parquet.write_table(pyarrow.table(rows), folders / "table" / "a.parquet")
    parquet.write_table(pyarrow.table({"x": [1], "y": ["z"]}), folders / "table" / "b.parquet")
    (folders / "table" / "c.parquet").write_bytes(b"PAR1 no")
    found = predict("table")
    assert found.returncode == 2
    assert [*labels(found)] == ["table/a.parquet#a", "table/a.parquet#2"]
    for words in (
        "a.parquet#a#2: the row has no picture",
        "a.parquet#b: it is not an image",
        "b.parquet: it has the columns x, y",
        "c.parquet: ",
    ):
        assert f"skipped table/{words}" in found.stderr


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("nowhere", ["--query nowhere", "no such folder or file"]),
        ("binary.txt", ["--query binary.txt", "not a text file"]),
        ("empty.txt", ["--query empty.txt", "no picture"]),
        ("pile/red-000.png", ["single picture", "folder"]),
        ("mixed", ["both tar archives and Parquet files"]),
        ("squeezed", ["squeezed/a.tar.gz: it is compressed"]),
    ],
)
def test_bad_piles(predict: Here, folders: Path, query: str, words: list[str]) -> None:
    (folders / "binary.txt").write_bytes(b"\0\1")
    (folders / "empty.txt").write_text("\n\n")
    for name in ("mixed/a.tar", "mixed/b.parquet", "squeezed/a.tar.gz"):
        (folders / name).parent.mkdir(exist_ok=True)
        (folders / name).write_bytes(b"")
    assert_one_line_error(predict(query), *words)


def test_without_pyarrow_there_is_one_line(predict: Here, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert_one_line_error(predict("a.parquet"), "Parquet files need pyarrow", "trident-fewshot[cluster]")


def test_names_are_unique() -> None:
    names = UniqueNames()
    assert [names.unique(name) for name in ("a", "a", "a#2", "a", "b")] == ["a", "a#2", "a#2#2", "a#3", "b"]


def test_a_folder_of_pictures_with_an_archive_in_it_is_a_folder_of_pictures(folders: Path) -> None:
    make_tar(folders / "pile" / "backup.tar", contents(folders / "pile"))
    assert len(find_pile(folders / "pile")[0]) == 15


def test_another_parquet_file_of_the_same_name_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for place, content in ((1, b"one"), (2, b"two")):
        folder = tmp_path / str(place)
        folder.mkdir()
        parquet.write_table(pyarrow.table({"image": [content]}), folder / "pile.parquet")
        monkeypatch.chdir(folder)
        (only,), unread = parquet_pictures([Path("pile.parquet")])
        assert (only.content(), unread) == (content, {})
