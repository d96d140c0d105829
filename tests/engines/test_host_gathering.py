"""Stores that stay in host memory: the same tasks bit for bit as from a store on the device, drawn ahead."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ablation_grids import TINY_RECIPE as RECIPE_FILE
from ablation_grids import Answer
from commands import assert_one_line_error
from stores import write_store
from studies.speed.__main__ import study
from studies.speed.made_up import large_made_up_store
from tiny import TINY_RECIPE, source_for, tiny_store
from trident.data.store import ImageStore, open_store
from trident.errors import TridentError
from trident.learning.checkpoint import LAST
from trident.tasks import images
from trident.tasks.images import Images
from trident.tasks.source import ClassSource, Source
from trident.tasks.task import tensors_of

Here = Callable[..., Answer]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    store = tiny_store()
    write_store(tmp_path / "noise.store", "noise", store.classes, iter(store.images))
    return tmp_path / "noise.store"


def tasks(store: ImageStore, **options: Any) -> Source:
    return source_for(TINY_RECIPE, store, **options)


def classes(store: ImageStore, **options: Any) -> Source:
    return ClassSource(store, 13, seed=1, **options)


@pytest.mark.parametrize("make", [tasks, classes])
@pytest.mark.parametrize("augmentation", ["none", "flip_shift", "crop_colour"])
def test_the_same_batches_bit_for_bit(file: Path, make: Callable[..., Source], augmentation: str) -> None:
    store = open_store(file)
    usual = make(store, augmentation=augmentation)
    gathered = make(replace(store, keep_on="host"), augmentation=augmentation)
    assert gathered.images.gathers and not usual.images.gathers
    steps = [[0, 1, 2], [3], [4, 5]]
    expected = [tensors_of(usual.batch(indices)) for indices in steps]
    started = [gathered.prefetch(indices) for indices in steps]
    for found in (
        [ready() for ready in started],
        list(gathered.prefetched(steps)),
        [gathered.batch(indices) for indices in steps],
        list(usual.prefetched(steps)),
    ):
        for batch, same in zip(found, expected, strict=True):
            for one, other in zip(tensors_of(batch), same, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_the_copy_on_the_device_is_the_whole_store(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU would have it, and checked before it is used."""
    monkeypatch.setattr(images, "_on_device", {})
    monkeypatch.setattr(images, "COPIED_AT_ONCE", 50)
    store, device = open_store(file), torch.device("cpu")
    whole = images._resident(store, device)
    assert whole is not None and np.array_equal(whole, store.images)
    assert images._resident(store, device) is whole
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    images._on_device.clear()
    with pytest.raises(TridentError, match=r"noise.store is damaged: block 1 of 1"):
        images._resident(open_store(file), device)
    assert not images._on_device


def test_features_are_gathered_too() -> None:
    numbers = np.random.default_rng(0).standard_normal((120, 7), np.float32)
    store = replace(tiny_store(), images=numbers, features_of="made up")
    positions = np.array([[3, 119], [0, 3]])
    found = Images(replace(store, keep_on="host"), "cpu").at(positions)
    assert torch.equal(found, torch.from_numpy(numbers[positions]))


def test_batches_are_drawn_while_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefetch` returns before the batch is drawn, and what goes wrong meanwhile reaches the one who asks for it."""
    source = tasks(replace(tiny_store(), keep_on="host"))
    released, drawn_by, batch = threading.Event(), [], source.batch

    def slow(indices: list[int]) -> Any:
        assert released.wait(30)
        drawn_by.append(threading.current_thread())
        return batch(indices)

    monkeypatch.setattr(source, "batch", slow)
    ready = source.prefetch([0])
    assert not drawn_by
    released.set()
    assert torch.equal(ready().task.images, batch([0]).task.images)
    assert drawn_by[0] is not threading.main_thread()

    def broken(indices: list[int]) -> Any:
        raise TridentError("a damaged block")

    monkeypatch.setattr(source, "batch", broken)
    failed = source.prefetch([1])
    with pytest.raises(TridentError, match="a damaged block"):
        failed()


def test_commands_give_the_same_results(file: Path, monkeypatch: pytest.MonkeyPatch, trident_here: Here) -> None:
    monkeypatch.chdir(file.parent)
    Path("tiny.toml").write_text(RECIPE_FILE)
    weights, measured = [], []
    for place in ("auto", "host"):
        call = ("--data", file.name, "--device", "cpu", "--store-on", place)
        trained = trident_here("train", "tiny.toml", "--out", place, *call)
        assert trained.returncode == 0, trained.stderr
        weights.append(load_file(Path(place) / LAST))
        measured.append(json.loads(trident_here("evaluate", "auto", "--tasks", 5, "--json", *call).stdout))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert measured[0] == measured[1]


@pytest.mark.parametrize(("needed", "fits"), [(59, True), (61, False)])
def test_a_third_of_the_gpu_is_left_free(monkeypatch: pytest.MonkeyPatch, needed: int, fits: bool) -> None:
    """Of 120 bytes 90 are free, and torch holds 10 more that it does not use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90, 120))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    store = replace(tiny_store(), images=np.zeros((needed, 1, 1, 1), np.uint8))
    assert images._fits(store, torch.device("cuda")) == fits


def test_a_store_stays_where_it_was_put_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation must not copy a large store to the GPU because some memory has become free meanwhile."""
    monkeypatch.setattr(images, "_on_device", {})
    for enough in (False, True):
        monkeypatch.setattr(images, "_fits", lambda store, device, enough=enough: enough)
        assert images._resident(tiny_store(), torch.device("cpu")) is None
    assert images._resident(replace(tiny_store(), keep_on="device"), torch.device("cpu")) is not None


def test_a_place_that_does_not_exist(trident_here: Here) -> None:
    with pytest.raises(TridentError, match="'disk': it can be auto, device, host"):
        Images(replace(tiny_store(), keep_on="disk"), "cpu")
    assert_one_line_error(trident_here("train", "glyphs", "--out", "run", "--store-on", "disk"), "disk")


def test_large_made_up_stores(trident_here: Here) -> None:
    store = large_made_up_store(TINY_RECIPE, 1000)
    assert len(store.images) == 999 == sum(entry.count for entry in store.classes)
    assert len(np.unique(store.images.reshape(999, -1), axis=0)) > 900
    call = [*("train", "--recipe", "glyphs", "--tasks", "1", "--repeats", "2", "--device", "cpu")]
    call += ["image_size=16", "backbone.channels=4", "n_query=2", "--images", "500"]
    found = json.loads(trident_here(*call, "--store-on", "host", "--json", command=study).stdout)
    assert found["seconds"] > 0 and found["ratio"] is None
    assert_one_line_error(trident_here(*call, "--data", "glyphs", command=study), "--images", "--data")
