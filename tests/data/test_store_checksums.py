"""Damaged stores: a flipped bit is found when the images around it are first used, and not before."""

import hashlib
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ablation_grids import TINY_RECIPE as RECIPE_FILE
from ablation_grids import Answer
from commands import assert_one_line_error
from stores import write_store
from tiny import TINY_RECIPE, source_for, tiny_store
from trident.data.store import ImageStore, open_store
from trident.errors import TridentError

Here = Callable[..., Answer]
IMAGE_BYTES, PER_BLOCK = 256, 10  # tiny_store has 120 images of 16x16, 40 for each split


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("trident.data.store.BLOCK_BYTES", PER_BLOCK * IMAGE_BYTES + 100)
    monkeypatch.chdir(tmp_path)
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    return tmp_path / "noise.store"


def header_length(file: Path) -> int:
    return int(struct.unpack("<Q", file.read_bytes()[:8])[0])


def flip(file: Path, place: int) -> None:
    """Change one bit of a byte, counted from the file's beginning or end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def flip_in_image(file: Path, number: int) -> None:
    flip(file, 8 + header_length(file) + number * IMAGE_BYTES + 33)


def read_all(store: ImageStore) -> None:
    for position in range(len(store.images)):
        store.check(np.array([position]))


def test_a_store_with_checksums_is_a_safetensors_file(file: Path) -> None:
    store = open_store(file)
    assert store.checksums is not None
    assert (store.checksums.per_block, len(store.checksums.digests)) == (PER_BLOCK, 12)
    assert np.array_equal(load_file(file)["images"], tiny_store().images)
    assert store.fingerprint == tiny_store().fingerprint
    read_all(store)
    read_all(pickle.loads(pickle.dumps(store)))


@pytest.mark.parametrize("number", [0, 9, 10, 87, 119])
def test_the_damaged_block_is_named(file: Path, number: int) -> None:
    flip_in_image(file, number)
    store = open_store(file)
    block = number // PER_BLOCK
    others = np.array([place for place in range(120) if place // PER_BLOCK != block])
    store.check(others)
    with pytest.raises(TridentError) as raised:
        store.check(np.array([[0, 40], [number, 41]]))
    first = block * PER_BLOCK
    assert str(raised.value).startswith(f"{file} is damaged: block {block + 1} of 12, images {first} to {first + 9}, ")


def test_a_damaged_header_is_refused_for_that_reason(file: Path) -> None:
    """Not because of what the flipped byte seems to say."""
    content = file.read_bytes()
    for place in (*range(8), *range(8, 8 + header_length(file), 29), content.index(b'header_checksum": ') + 40):
        file.write_bytes(content)
        flip(file, place)
        with pytest.raises(TridentError, match="is not a trident store, or damaged") as raised:
            open_store(file)
        assert place < 8 or str(raised.value).endswith("does not match its checksum, so the file is damaged")


def test_each_block_is_hashed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, hashed = open_store(file), []
    original = hashlib.sha256

    def counting(content: memoryview) -> Any:
        hashed.append(len(content))
        return original(content)

    monkeypatch.setattr(hashlib, "sha256", counting)
    for _ in range(3):
        store.check(np.array([3, 7, 25]))
    assert hashed == [PER_BLOCK, PER_BLOCK]
    read_all(store)
    read_all(store)
    assert len(hashed) == 12


@pytest.mark.parametrize("place", ["auto", "host"])
def test_commands_stop_at_damaged_images_that_they_use(file: Path, trident_here: Here, place: str) -> None:
    (file.parent / "tiny.toml").write_text(RECIPE_FILE)
    flip_in_image(file, 100)  # a test image
    call = ("--data", file.name, "--device", "cpu", "--store-on", place)
    trained = trident_here("train", "tiny.toml", "--out", "run", *call)
    assert trained.returncode == 0, trained.stderr
    measured = trident_here("evaluate", "run", "--split", "val", "--tasks", 3, *call)
    assert measured.returncode == 0, measured.stderr
    damaged = (str(file), "block 11 of 12", "images 100 to 109", "trident data prepare")
    assert_one_line_error(trident_here("evaluate", "run", "--split", "test", "--tasks", 20, *call), *damaged)
    assert_one_line_error(trident_here("data", "show", file, "--verify"), *damaged)
    assert trident_here("data", "show", file).returncode == 0
    for number in range(0, 40, PER_BLOCK):  # training images
        flip_in_image(file, number)
    found = trident_here("train", "tiny.toml", "--out", "other", *call)
    assert found.returncode == 2 and f"{file} is damaged: block " in found.stderr and found.stderr.count("\n") == 1


def test_stores_of_older_versions_are_used_without_checks(file: Path, trident_here: Here) -> None:
    content, length = file.read_bytes(), header_length(file)
    header = json.loads(content[8 : 8 + length])
    for key in ("images_per_block", "block_checksums", "header_checksum"):
        del header["__metadata__"][key]
    old = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(old)) + old + content[8 + length :])
    store = open_store(file)
    assert store.checksums is None
    assert np.array_equal(store.images, tiny_store().images)
    source_for(TINY_RECIPE, store).batch([0])
    assert "checksums            0" in trident_here("data", "show", file, "--verify").stdout
    flip_in_image(file, 100)
    read_all(open_store(file))
    assert_one_line_error(trident_here("data", "show", file, "--verify"), str(file), "fingerprint")
