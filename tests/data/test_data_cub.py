"""CUB from its own lists and as a mirror lays it out."""

from pathlib import Path

from data_pictures import picture, refusal, save, save_class_folders, table
from trident.data.cub import chen_split
from trident.data.prepare import prepare
from trident.data.store import SPLITS


def save_cub(root: Path, labels: list[int]) -> Path:
    names = [f"{number:03d}.Bird_{number}" for number in range(1, 9)]
    root.mkdir(parents=True)
    (root / "classes.txt").write_text("".join(f"{number} {name}\n" for number, name in enumerate(names, 1)))
    images, image_labels = "", ""
    for image, label in enumerate(labels, 1):
        name = f"{names[label - 1]}/bird_{image:04d}.png"
        save(root / "images" / name, picture(image, 90, 84))
        images += f"{image} {name}\n"
        image_labels += f"{image} {label}\n"
    (root / "images.txt").write_text(images)
    (root / "image_class_labels.txt").write_text(image_labels)
    return root


CUB = {
    "001.Bird_1": ("train", 2),
    "003.Bird_3": ("train", 1),
    "002.Bird_2": ("val", 1),
    "006.Bird_6": ("val", 1),
    "004.Bird_4": ("test", 1),
    "008.Bird_8": ("test", 1),
}


def test_cub(tmp_path: Path) -> None:
    root = save_cub(tmp_path / "data" / "CUB_200_2011", [1, 1, 2, 3, 4, 6, 8])
    store = prepare("cub", root, tmp_path / "a.st")
    assert table(store) == CUB
    assert prepare("cub", tmp_path / "data", tmp_path / "b.st").fingerprint == store.fingerprint
    for image in sorted((root / "images").glob("*/*.png")):  # the mirror's form
        part = "test" if image.name == "bird_0002.png" else "train"
        (tmp_path / "mirror" / part / image.parent.name).mkdir(parents=True, exist_ok=True)
        image.rename(tmp_path / "mirror" / part / image.parent.name / image.name)
    assert prepare("cub", tmp_path / "mirror", tmp_path / "c.st").fingerprint == store.fingerprint


def test_the_whole_of_cub_is_split_100_50_50() -> None:
    splits = [chen_split(index) for index in range(200)]
    assert [splits.count(split) for split in SPLITS] == [100, 50, 50]


def test_mistakes_in_cub(tmp_path: Path) -> None:
    root = save_cub(tmp_path / "CUB_200_2011", [1, 2, 4])
    labels = root / "image_class_labels.txt"
    labels.write_text("1 1\n2 2\n3 9\n")
    assert "image 3 has class 9, which is not in" in refusal("cub", root)
    labels.write_text("1 1\n2 2\n3 x\n")
    assert "image 3 has class x" in refusal("cub", root)
    labels.write_text("1 1\n2 2\n")
    assert "has no line for image 3" in refusal("cub", root)
    labels.write_text("1 1\n2 2\n2 2\n")
    assert "number 2 is there twice" in refusal("cub", root)
    labels.write_text("one 1\n")
    assert "expected a number and a name" in refusal("cub", root)
    labels.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refusal("cub", root)
    labels.write_text("1 1\n2 2\n3 4\n")
    next((root / "images").glob("*/*.png")).unlink()
    assert "1 image listed in" in refusal("cub", root)
    labels.unlink()
    assert "has no image_class_labels.txt" in refusal("cub", root)
    assert "is not CUB_200_2011" in refusal("cub", save_class_folders(tmp_path / "other", {"a": 1}))
    assert "not named like a class of CUB" in refusal(
        "cub", save_class_folders(tmp_path / "odd", {"train/wren": 1}).parent / "odd"
    )
