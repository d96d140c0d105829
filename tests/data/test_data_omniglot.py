"""Omniglot from zip files and folders."""

import zipfile
from pathlib import Path

import pytest

from data_pictures import picture, png, refusal, save, save_class_folders
from trident.data.prepare import prepare


def save_omniglot(root: Path, set_name: str, alphabets: list[str]) -> Path:
    for alphabet in alphabets:
        for character in ("character01", "character02"):
            for number in range(2):
                drawing = picture(number, 105)[:, :, 0] > 100
                save(root / set_name / alphabet / character / f"{number:04d}_01.png", drawing)
    return root / set_name


def zip_folder(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder.parent))
    return path


def omniglot_splits(source: Path, target: Path) -> dict[str, str]:
    store = prepare("omniglot", source, target)
    assert store.images.shape[1:] == (28, 28, 1)
    assert all(entry.count == 2 for entry in store.classes)
    return {entry.name.split("/")[0]: entry.split for entry in store.classes}


def test_omniglot_zips_and_folders(tmp_path: Path) -> None:
    data = tmp_path / "data"
    background = save_omniglot(data, "images_background", ["D", "A", "C", "B", "E"])
    evaluation = save_omniglot(data, "images_evaluation", ["Z", "Y"])
    expected = {"A": "train", "B": "train", "C": "train", "D": "train", "E": "val", "Y": "test", "Z": "test"}
    assert omniglot_splits(data, tmp_path / "folders.st") == expected
    for folder in (background, evaluation):
        zip_folder(folder)
        folder.rename(tmp_path / folder.name)
    assert omniglot_splits(data, tmp_path / "zips.st") == expected
    assert (tmp_path / "zips.st").read_bytes() == (tmp_path / "folders.st").read_bytes()
    by_itself = {"A": "train", "B": "train", "C": "train", "D": "val", "E": "test"}
    assert omniglot_splits(data / "images_background.zip", tmp_path / "one.st") == by_itself
    assert omniglot_splits(tmp_path / "images_background", tmp_path / "one_folder.st") == by_itself


def test_the_last_five_of_thirty_alphabets_are_held_out(tmp_path: Path) -> None:
    alphabets = [f"A{number:02d}" for number in range(30)]
    save_omniglot(tmp_path / "data", "images_background", alphabets)
    alone = omniglot_splits(tmp_path / "data", tmp_path / "alone.st")
    assert [alone[name] for name in alphabets] == ["train"] * 20 + ["val"] * 5 + ["test"] * 5
    save_omniglot(tmp_path / "data", "images_evaluation", ["Z"])
    both = omniglot_splits(tmp_path / "data", tmp_path / "both.st")
    assert [both[name] for name in alphabets] == ["train"] * 25 + ["val"] * 5


def test_mistakes_in_omniglot(tmp_path: Path) -> None:
    path = tmp_path / "images_background.zip"
    png_bytes = png(picture(0, 105)).tobytes()

    def with_member(name: str, content: bytes = png_bytes) -> str:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for alphabet in "ABC":
                archive.writestr(f"images_background/{alphabet}/character01/0001_01.png", png_bytes)
            archive.writestr(name, content)
        return refusal("omniglot", path)

    for name in ("../../A/b.png", "/images_background/A/c.png", "a\\b.png", "images_background/A/b.png", "notes.txt"):
        assert "is not of the form SET/ALPHABET/CHARACTER/IMAGE.png" in with_member(name)
    assert "too many for a drawing" in with_member("images_background/A/character02/1.png", bytes(50_000_000))
    assert "holds 2 sets" in with_member("images_evaluation/A/character02/1.png")
    message = with_member("images_background/A/character02/1.png", b"text")
    assert message.startswith("1 image cannot be read,")
    assert "images_background.zip: images_background/A/character02/1.png: it is not an image" in message
    with pytest.warns(UserWarning, match="Duplicate name"):
        assert "is there twice" in with_member("images_background/A/character01/0001_01.png")
    content = zip_folder(save_omniglot(tmp_path / "damaged", "images_background", ["A", "B", "C"])).read_bytes()
    drawing = (tmp_path / "damaged/images_background/A/character01/0001_01.png").read_bytes()
    path.write_bytes(content.replace(drawing, drawing[:-1] + b"x", 1))  # zip_folder does not compress
    assert "Bad CRC-32" in refusal("omniglot", path)
    path.write_bytes(content[: len(content) // 2])
    assert "is not a whole zip file" in refusal("omniglot", path)
    path.write_text("<html>")
    assert "is not a whole zip file" in refusal("omniglot", tmp_path)
    path.unlink()
    assert "has no images_background.zip" in refusal("omniglot", save_class_folders(tmp_path / "other", {"a": 1}))
    assert "at least 3 are needed" in refusal("omniglot", save_omniglot(tmp_path, "images_background", ["A", "B"]))
