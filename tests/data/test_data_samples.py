"""The readers on real pictures, where TRIDENT_SAMPLES names a folder of samples from the public datasets."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pictures import table
from trident.data.prepare import prepare
from trident.data.store import SPLITS, describe, verify_fingerprint


@pytest.fixture
def samples() -> Path:
    folder = os.environ.get("TRIDENT_SAMPLES")
    if not folder:
        pytest.skip("TRIDENT_SAMPLES is not set: there are no real pictures to read")
    return Path(folder)


def test_mini_imagenet(samples: Path, tmp_path: Path) -> None:
    store = prepare("mini-imagenet", samples / "mini_imagenet", tmp_path / "lists.st")
    assert verify_fingerprint(store)
    assert [describe(store)["splits"][split]["classes"] for split in SPLITS] == [8, 5, 6]
    assert all(entry.count == 30 for entry in store.classes)
    whole = json.loads((samples / "mini_imagenet_split.json").read_text())
    assert all(entry.name in whole[entry.split] for entry in store.classes)

    for split in SPLITS:  # the same pictures as caches
        entries = store.classes_of(split)
        first = entries[0].start
        images = np.array(store.images[first : entries[-1].start + entries[-1].count])
        numbers = {entry.name: [entry.start - first + place for place in range(entry.count)] for entry in entries}
        content = pickle.dumps({"image_data": images, "class_dict": numbers}, 2)
        (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(content)
    assert prepare("mini-imagenet", tmp_path, tmp_path / "caches.st").fingerprint == store.fingerprint

    folders = tmp_path / "folders"  # and as class folders
    for image in (samples / "mini_imagenet" / "images").iterdir():
        parent = folders / ("val" if image.stem.endswith("1") else "train") / image.name[:9]
        parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, parent)
    split_of = {split: [entry.name for entry in store.classes_of(split)] for split in SPLITS}
    (folders / "split.json").write_text(json.dumps(split_of))
    assert prepare("mini-imagenet", folders, tmp_path / "folders.st").fingerprint == store.fingerprint


def test_cub(samples: Path, tmp_path: Path) -> None:
    store = prepare("cub", samples / "CUB_200_2011", tmp_path / "a.st")
    assert store.images.shape == (288, 84, 84, 3)
    assert [len(store.classes_of(split)) for split in SPLITS] == [6, 6, 6]
    assert table(store)["010.Red_winged_Blackbird"] == ("val", 16)


def test_omniglot(samples: Path, tmp_path: Path) -> None:
    store = prepare("omniglot", samples / "omniglot_background_small1.zip", tmp_path / "a.st")
    assert store.images.shape == (2720, 28, 28, 1)
    assert {entry.count for entry in store.classes} == {20}
    assert {entry.name.split("/")[0] for entry in store.classes_of("val")} == {"Korean"}
    assert {entry.name.split("/")[0] for entry in store.classes_of("test")} == {"Latin"}
    assert 0.03 < np.asarray(store.images).mean() / 255 < 0.2  # thin bright strokes on black
