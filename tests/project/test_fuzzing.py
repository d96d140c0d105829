"""Thousands of odd weights files, stores, pickles, recipes and command lines: each is read, or refused in one line.

No traceback, not more than 20 s, not more than 2 GiB. The default run tries hundreds, `make test-soak` 11,000.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import strategies as st
from safetensors.torch import save

from commands import run_here
from fuzzing import changed, odd_changes, to_json, try_many
from stores import write_store
from tiny import TINY_RECIPE, initial, tiny_store
from trident.cli.app import app
from trident.data.prepare import read_dataset
from trident.data.store import NO_DIGEST, digest_of_header, open_store
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from trident.recipes.files import recipe_names
from trident.recipes.loading import load_recipe, recipe_from, recipe_values, setting_types, with_overrides

Drawn = st.SearchStrategy[list[Any]]


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.soak)])


def assert_one_line(error: TridentError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 3000, "a message that nobody reads"


@few_or_many(60, 2500)
def test_weights(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "odd.safetensors"
    start = {"step": 3, "trained_on": "noise", "steps_before": 2, "trained_on_before": ["other"], "provenance": {}}
    provenance = {"data": None, "dataset": "noise", "fingerprint": "0", "start": start}
    best = {"step": 5, "accuracy": 60.5, "ci95": 1.5}
    parameters, running = initial(TINY_RECIPE.model), TINY_RECIPE.model.initial_running()
    save_checkpoint(path, Checkpoint(TINY_RECIPE, parameters, running, 5, best=best, provenance=provenance))
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    about = json.loads(json.loads(whole[8 : 8 + length])["__metadata__"]["trident"])
    tensors = {f"parameters/{key}": value for key, value in parameters.items()}
    tensors |= {f"running/{key}": value for key, value in running.items()}
    load_checkpoint(path)

    def check(changes: list[tuple[int, Any]], flips: list[tuple[int, int]]) -> None:
        if flips:
            content = bytearray(whole)
            for place, byte in flips:
                content[place % (8 + length)] = byte
            path.write_bytes(content)
        else:
            text = to_json(changed(about, changes))
            path.write_bytes(save(tensors, {"format": "trident-checkpoint-2", "trident": text}))
        try:
            loaded = load_checkpoint(path)
        except TridentError as error:
            assert_one_line(error)
        else:
            assert loaded.describe().isprintable()
            json.dumps(loaded.summary(), allow_nan=False)

    flips: Drawn = st.one_of(st.just([]), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3))
    try_many(examples, check, changes=odd_changes, flips=flips)


@few_or_many(60, 2500)
def test_stores(tmp_path: Path, examples: int) -> None:
    path, store = tmp_path / "odd.store", tiny_store(2)
    write_store(path, "noise", store.classes, iter(store.images))
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, pixels = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    open_store(path)

    def check(changes: list[tuple[int, Any]], within: str, signed: bool, flips: list[tuple[int, int]]) -> None:
        odd = json.loads(json.dumps(header))
        metadata = odd["__metadata__"]
        if within == "classes":
            metadata["classes"] = to_json(changed(json.loads(metadata["classes"]), changes))
        else:
            odd = changed(odd, changes)
        if isinstance(odd, dict) and isinstance(odd.get("__metadata__"), dict):
            if signed:  # with the right checksum of the wrong header
                odd["__metadata__"]["header_checksum"] = NO_DIGEST
                odd["__metadata__"]["header_checksum"] = digest_of_header(to_json(odd).encode(), NO_DIGEST)
            else:
                for key in ("header_checksum", "images_per_block", "block_checksums"):
                    odd["__metadata__"].pop(key, None)
        content = bytearray(to_json(odd).encode())
        for place, byte in flips:
            content[place % len(content)] = byte
        path.write_bytes(struct.pack("<Q", len(content)) + content + pixels)
        try:
            opened = open_store(path)
            for entry in opened.classes:
                assert len(opened.images[entry.start : entry.start + entry.count]) == entry.count > 0
        except TridentError as error:
            assert_one_line(error)

    flips = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=2)
    within = st.sampled_from(["classes", "header"])
    try_many(examples, check, changes=odd_changes, within=within, signed=st.booleans(), flips=flips)


# Parts of pickles: values, containers, calls, copies from memory and to it.
_PIECES = [
    *(b"N", b"K\x00", b"K\x01", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\x7f" * 9, b"G\x7f\xf8" + b"\0" * 6, b"\x88"),
    *(b"X\x01\x00\x00\x00a", b"U\x02u1", b"U\x02O8", b"C\x04abcd", b"X\x06\x00\x00\x00latin1", b"I12\n", b"L99L\n"),
    *(b"]", b")", b"}", b"\x8f", b"(", b"a", b"e", b"t", b"l", b"d", b"s", b"u", b"\x90", b"\x91", b"0", b"1", b"2"),
    *(b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x94", b"h\x00h\x00\x86", b"h\x01h\x01\x86", b"(h\x00h\x00l"),
    *(b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"),
    *(b"cnumpy.core.multiarray\nscalar\n", b"cnumpy.core.numeric\n_frombuffer\n", b"ccollections\nOrderedDict\n"),
    *(b"c__builtin__\nset\n", b"c__builtin__\nfrozenset\n", b"cos\nsystem\n", b"q\x00", b"q\x01", b"h\x00", b"h\x01"),
    b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
    b"(K\x01K\x04\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89C\x04abcdtb",
    b"q\x00h\x00h\x00\x86" * 12,
    b"q\x00]h\x00ah\x00a" * 12,
]


@few_or_many(150, 3000)
def test_pickles(tmp_path: Path, examples: int) -> None:
    names = [f"{split}_{what}.pkl" for split in ("train", "val", "test") for what in ("labels", "images_png")]
    names += [f"CIFAR_FS_{split}.pickle" for split in ("train", "val", "test")]

    def check(pieces: list[bytes], field: str, reader: str) -> None:
        inner = b"".join(pieces)
        dressed = b"}(" + b"X%c\0\0\0%s" % (len(field), field.encode()) + inner + b"u" if field else inner
        for name in names:
            (tmp_path / name).write_bytes(b"\x80\x04" + dressed + b".")
        try:
            dataset = read_dataset(reader, tmp_path)
            for image in dataset.sources[:10]:
                image.key()
        except TridentError as error:
            assert_one_line(error)

    pieces = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=40)
    fields = st.sampled_from(["", "label_specific", "label_specific_str", "labels", "data"])
    readers = st.sampled_from(["tiered-imagenet", "cifar-fs"])
    try_many(examples, check, pieces=pieces, field=fields, reader=readers)


_TEXTS = ["0", "-1", "1", "17", "nan", "inf", "-inf", "1e300", "1e-300", "none", "true", "", "x", "9" * 30, "9" * 5000]


@few_or_many(60, 1500)
def test_recipes(examples: int) -> None:
    names = recipe_names()
    bases = {name: load_recipe(name) for name in names[:: max(1, len(names) // 20)]}
    tables = {name: recipe_values(recipe) for name, recipe in bases.items()}

    def check(name: str, changes: list[tuple[int, Any]], overrides: list[tuple[int, str]]) -> None:
        keys = list(setting_types(bases[name]))
        given = [f"{keys[number % len(keys)]}={text}" for number, text in overrides]
        try:
            recipe = with_overrides(bases[name], given) if given else recipe_from(changed(tables[name], changes), name)
            recipe.describe_protocol()
            recipe.shapes()
        except TridentError as error:
            assert_one_line(error)

    texts = st.one_of(st.sampled_from(_TEXTS), st.integers().map(str), st.floats().map(str), st.text(max_size=10))
    overrides: Drawn = st.one_of(st.just([]), st.lists(st.tuples(st.integers(0, 10**6), texts), min_size=1, max_size=3))
    try_many(examples, check, name=st.sampled_from(list(bases)), changes=odd_changes, overrides=overrides)


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """All commands and those of groups, by their names."""
    if not hasattr(group, "commands"):
        return {path: group}
    return {
        way: found for name, inner in group.commands.items() for way, found in commands(inner, (*path, name)).items()
    }


_ARGUMENTS = [
    *(
        "nope",
        "",
        "x" * 5000,
        "../x",
        "empty",
        "file.txt",
        "deep.json",
        "bad.toml",
        "/dev/zero",
        "é\n",
        "\x1b[31m",
        "-1",
    ),
    *("0", "nan", "1e300", "9" * 30, "glyphs", "training.steps=0", "n_way=9999999999", "=", "seed=-1", "\udcff", "."),
]


@few_or_many(100, 1500)
def test_command_lines(tmp_path: Path, examples: int) -> None:
    """Every command with odd arguments and options. An impossible device keeps those that are right from running."""
    found = commands(typer.main.get_command(app))
    assert ("data", "prepare") in found
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "bad.toml").write_text("a=[" * 1000)

    def check(number: int, arguments: list[str], options: list[tuple[int, str]]) -> None:
        path = list(found)[number % len(found)]
        known = [option for option in found[path].params if option.opts[0].startswith("--")]
        line = [*path, *arguments]
        for place, value in options if known else ():
            option = known[place % len(known)]
            if option.opts[0] not in ("--device", "--help", "--clear"):
                line += [option.opts[0]] if option.is_flag else [option.opts[0], value]
        if any(option.opts[0] == "--device" for option in known):
            line += ["--device", "nowhere"]
        answer = run_here(tmp_path, *line)
        assert answer.returncode in (0, 2), answer.stderr
        if answer.returncode:
            assert len(answer.stderr.splitlines()) == 1, answer.stderr
            assert answer.stderr.startswith("trident: error: ")

    arguments = st.lists(st.sampled_from(_ARGUMENTS), max_size=2)
    options = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(_ARGUMENTS)), max_size=3)
    try_many(examples, check, number=st.integers(0, 1000), arguments=arguments, options=options)
