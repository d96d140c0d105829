"""Weights files, stores and recipes with absurd values: one line says what is wrong, at once."""

import copy
import dataclasses
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from ablation_grids import Answer
from bounds import bounded
from stores import write_store
from tiny import tiny_store
from trident.backbones import BACKBONES
from trident.data.store import open_store
from trident.errors import TridentError
from trident.importing import imported
from trident.learning.checkpoint import load_checkpoint
from trident.methods.registry import METHODS, method_class
from trident.recipes.loading import load_recipe
from trident.settings import LARGEST, EpisodeSpec, Protocol, TrainingSettings, Views
from trident.weights import weights_file

NAME = "mini-5w1s-set"


@pytest.fixture(scope="module")
def parts() -> tuple[dict[str, torch.Tensor], dict[str, Any], str]:
    """The tensors of included weights, what they say about themselves, and the name of their format."""
    with safe_open(weights_file(NAME), "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    return tensors, json.loads(metadata["trident"]), metadata["format"]


Parts = tuple[dict[str, torch.Tensor], dict[str, Any], str]


def changed(about: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    about = copy.deepcopy(about)
    *before, last = path.split(".")
    inner = about
    for key in before:
        inner = inner[key]
    inner[last] = value
    return about


ABSURD: dict[str, list[Any]] = {
    "step": [float("inf"), float("nan"), -5, "x" * 5000, 2**70, True, None, 1.5],
    "validated_step": [-1, float("inf")],
    "best": ["x", [], {}, {"step": 1}, {"step": -1, "accuracy": 5}, {"step": 1, "accuracy": float("nan")}],
    "provenance": [
        *([], "x", None, {"start": "x"}, {"start": {"step": 1}}, {"start": []}, {"dataset": {"a": 1}}),
        {"start": {"step": 1, "trained_on": 5, "provenance": []}},
        {"start": {"step": -1, "trained_on": "x", "provenance": {}}},
        {"start": {"step": 1, "trained_on": "x", "provenance": {}, "steps_before": float("inf")}},
        {"start": {"step": 1, "trained_on": "x", "provenance": {}, "trained_on_before": 5}},
        {"fingerprint": 5},
        {"dataset": "\x1b[31mred\nline"},
    ],
    "temperatures": [{"many": 0}, {"many": float("nan")}, {"many": [1]}, {"many": 1e-320}, {"other": 1}, []],
    "recipe": ["x", [], None],
    "recipe.name": ["../../x\n", "x" * 5000, 5],
    "recipe.method.name": [5, "x" * 5000, None, "\n"],
    "recipe.backbone.name": [5, "x" * 5000, None, "\n"],
    "recipe.backbone.image_size": [100_000, 2000, -1, 0],
    "recipe.backbone.channels": [10**9, 10**5, 10**30, 3.5, -1, 0],
    "recipe.method.label_latents": [10**12, 5000],
    "recipe.method.inner_steps": [10**9],
    "recipe.method.refinements": [10**9],
    "recipe.method.inner_rate": [1e300, float("inf")],
    "recipe.episode.n_way": [0, 10**18],
    "recipe.training.seed": [-1],
}


def test_names_in_any_script_can_be_read(tmp_path: Path, parts: Parts) -> None:
    """A no-break space or a joiner of letters is not printable for Python, but harmless in a name."""
    tensors, about, name = parts
    odd = "Aufnahme\u00a01 \u0915\u094d\u200d\u0937.store"
    metadata = {"format": name, "trident": json.dumps(changed(about, "provenance.data", odd))}
    (tmp_path / "odd.safetensors").write_bytes(save(tensors, metadata))
    assert load_checkpoint(tmp_path / "odd.safetensors").provenance["data"] == odd


@pytest.mark.parametrize("path", ABSURD)
def test_absurd_values_in_weights_files(tmp_path: Path, parts: Parts, path: str) -> None:
    tensors, about, name = parts
    for value in ABSURD[path]:
        metadata = {"format": name, "trident": json.dumps(changed(about, path, value))}
        (tmp_path / "odd.safetensors").write_bytes(save(tensors, metadata))
        with bounded(seconds=5, most_bytes=300 * 2**20), pytest.raises(TridentError) as raised:
            load_checkpoint(tmp_path / "odd.safetensors")
        assert str(raised.value).isprintable(), value
        assert len(str(raised.value)) < 1000


NESTED = ["[" * 200_000, '{"recipe":' + "[" * 200_000 + "]" * 200_000 + "}", "{", "[]", "null", '"x"', "9" * 5000]


@pytest.mark.parametrize("text", NESTED, ids=range(len(NESTED)))
def test_nested_and_broken_json_in_weights_files(tmp_path: Path, parts: Parts, text: str) -> None:
    tensors, _, name = parts
    (tmp_path / "odd.safetensors").write_bytes(save(tensors, {"format": name, "trident": text}))
    with bounded(seconds=5), pytest.raises(TridentError):
        load_checkpoint(tmp_path / "odd.safetensors")


def test_runs_that_started_from_runs_without_end(tmp_path: Path, parts: Parts) -> None:
    tensors, about, name = parts
    provenance: dict[str, Any] = {}
    for _ in range(100):
        provenance = {"start": {"step": 1, "trained_on": "x", "provenance": provenance}}
    metadata = {"format": name, "trident": json.dumps({**about, "provenance": provenance})}
    (tmp_path / "odd.safetensors").write_bytes(save(tensors, metadata))
    with pytest.raises(TridentError, match=r"runs|nested"):
        load_checkpoint(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("length", [0, 2, 2**25, 2**63, 2**64 - 1])
def test_headers_of_stated_lengths(tmp_path: Path, length: int) -> None:
    with (tmp_path / "odd.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(2**26)
    with bounded(seconds=5, most_bytes=300 * 2**20), pytest.raises(TridentError):
        load_checkpoint(tmp_path / "odd.safetensors")


def with_header(path: Path, header: dict[str, Any] | bytes, pixels: bytes) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + pixels)
    return path


@pytest.fixture
def store_parts(tmp_path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a store, without its checksums, as an older version or an attacker writes it, and its pixels."""
    store = tiny_store(2)
    write_store(tmp_path / "whole.store", "noise", store.classes, iter(store.images))
    content = (tmp_path / "whole.store").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for key in ("header_checksum", "images_per_block", "block_checksums"):
        header["__metadata__"].pop(key)
    return header, content[8 + length :]


def table(header: dict[str, Any], change: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """The header with a changed class table."""
    header = copy.deepcopy(header)
    classes = json.loads(header["__metadata__"]["classes"])
    change(classes)
    header["__metadata__"]["classes"] = json.dumps(classes)
    return header


TABLES: dict[str, Callable[[list[Any]], Any]] = {
    "far start": lambda classes: classes[0].update(start=10**9),
    "negative start": lambda classes: classes[0].update(start=-50),
    "text as start": lambda classes: classes[0].update(start="x"),
    "negative count": lambda classes: (classes[0].update(count=-2), classes[1].update(count=6)),
    "fraction as count": lambda classes: classes[0].update(count=2.0),
    "true as start": lambda classes: classes[0].update(start=False),
    "no images": lambda classes: (classes[0].update(count=0), classes[1].update(start=0, count=4)),
    "unknown split": lambda classes: classes[0].update(split="zzz"),
    "number as split": lambda classes: classes[0].update(split=5),
    "list as name": lambda classes: classes[0].update(name=[1]),
    "overlap": lambda classes: classes[1].update(start=classes[5]["start"]),
    "missing key": lambda classes: classes[0].pop("name"),
    "unknown key": lambda classes: classes[0].update(zzz=1),
    "not a table": lambda classes: classes.__setitem__(0, 5),
    "no classes": lambda classes: classes.clear(),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_odd_class_tables_of_stores(
    tmp_path: Path, store_parts: tuple[dict[str, Any], bytes], change: Callable[[list[Any]], Any]
) -> None:
    header, pixels = store_parts
    with pytest.raises(TridentError, match="is not a trident store") as raised:
        open_store(with_header(tmp_path / "odd.store", table(header, change), pixels))
    assert str(raised.value).isprintable()


SHAPES = [
    *([30, 0, 16, 1], [30, -16, -16, 1], [30, 32, 8, 1], [30, 10**9, 10**9, 10**9], [30, 2.5, 16, 1]),
    *([30, 16, 16], [30, 8, 8, 4], "x", None, [True, 16, 16, 1], [30, 16, 16, 1, 1]),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_of_stores(tmp_path: Path, store_parts: tuple[dict[str, Any], bytes], shape: Any) -> None:
    header, pixels = store_parts
    header = {**header, "images": {**header["images"], "shape": shape}}
    with pytest.raises(TridentError, match="is not a trident store"):
        open_store(with_header(tmp_path / "odd.store", header, pixels))


def test_odd_headers_of_stores(tmp_path: Path, store_parts: tuple[dict[str, Any], bytes]) -> None:
    header, pixels = store_parts
    path = tmp_path / "odd.store"
    assert open_store(with_header(path, header, pixels)).images.shape == (30, 16, 16, 1)
    metadata = header["__metadata__"]
    odd: list[tuple[Any, bytes]] = [
        ({**header, "images": {**header["images"], "dtype": "F32"}}, pixels),
        ({**header, "__metadata__": {**metadata, "fingerprint": None}}, pixels),
        ({**header, "__metadata__": {**metadata, "dataset": 5}}, pixels),
        ({**header, "__metadata__": {**metadata, "classes": "[" * 200_000}}, pixels),
        (header, pixels[:-1]),
        (header, pixels + b"\0"),
        (b"[" * 200_000, pixels),
        (b"[]", pixels),
        (b"", b""),
        (b'{"__metadata__":[]}', pixels),
    ]
    for content, behind in odd:
        with bounded(seconds=5), pytest.raises(TridentError, match="is not a trident store"):
            open_store(with_header(path, content, behind))


def test_a_store_whose_header_is_huge(tmp_path: Path) -> None:
    with (tmp_path / "odd.store").open("wb") as file:
        file.write(struct.pack("<Q", 2**29))
        file.truncate(2**30)
    with bounded(seconds=5, most_bytes=200 * 2**20), pytest.raises(TridentError, match="is not a trident store"):
        open_store(tmp_path / "odd.store")


TOO_LARGE = [
    *("backbone.image_size=1000000", "channels=" + "9" * 30, "episode.n_way=1000000000000000000", "channels=100000"),
    *("training.tasks_per_step=1000000000000", "n_way=10000", "inner_steps=1000000000", "label_latents=1000000000000"),
    *("training.rate=1e300", "training.weight_decay=inf", "channels=4096", "training.clip_norm=nan"),
]


@pytest.mark.parametrize("override", TOO_LARGE)
def test_settings_have_largest_values(override: str) -> None:
    with bounded(seconds=5, most_bytes=300 * 2**20), pytest.raises(TridentError) as raised:
        load_recipe("glyphs", [override] if override != "n_way=10000" else [override, "training.tasks_per_step=100000"])
    assert "\n" not in str(raised.value)


def test_every_whole_number_among_the_settings_states_its_largest_value() -> None:
    kinds = [EpisodeSpec, Protocol, Views, TrainingSettings, *map(imported, BACKBONES.values())]
    for kind in [*kinds, *map(method_class, METHODS)]:
        for entry in dataclasses.fields(kind):
            if entry.type in (int, "int", int | None, "int | None"):
                assert entry.metadata["most"] != LARGEST or kind is TrainingSettings, f"{kind.__name__}.{entry.name}"


RECIPES = {
    "deep": "a=[" * 100_000,
    "not text": b"\xff\xfe",
    "many digits": 'summary="x"\ndataset="glyphs"\n[training]\nsteps=1' + "0" * 5000,
    "hexadecimal digits": 'summary="x"\ndataset="glyphs"\n[training]\nschedule=0x' + "f" * 50_000,
    "nested value": 'summary="x"\ndataset="glyphs"\n[training]\nsteps=' + "[" * 150 + "]" * 150,
    "control characters": 'summary="\\u001b[31m"\ndataset="glyphs"',
    "wrong types": 'summary=5\nname=1\ndataset="glyphs"',
    "long": "#" * 2**21,
}


@pytest.mark.parametrize("content", RECIPES.values(), ids=RECIPES)
def test_odd_recipes(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with bounded(seconds=5), pytest.raises(TridentError) as raised:
        load_recipe(str(path))
    assert len(str(raised.value)) < 1000


def test_recipes_are_known_by_their_names_only() -> None:
    with pytest.raises(TridentError, match="no recipe is called"):
        load_recipe("../recipes/glyphs")


def test_the_largest_values_are_printed(trident_here: Callable[..., Answer]) -> None:
    assert "[at most 1024]" in trident_here("recipes", "glyphs").stdout


@pytest.mark.parametrize(("closed", "code"), [(">&-", 2), ("2>&-", 0), (">&- 2>&-", 2)])
def test_without_an_output(tmp_path: Path, closed: str, code: int) -> None:
    command = [sys.executable, "-m", "trident", "--version"]
    answer = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True, timeout=60)
    assert answer.returncode == code
    lines = answer.stderr.splitlines()
    assert len(lines) == (closed == ">&-")
    assert all("standard output is closed" in line for line in lines)
