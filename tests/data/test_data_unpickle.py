"""The restricted unpickler: data comes through whole, and nothing else comes through at all."""

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pictures import python2_pickle
from trident.data.unpickle import load_pickle
from trident.errors import TridentError

DATA = {
    "pixels": np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    "strings": np.array(["a", "bcd"]),
    "objects": np.array([np.zeros(3, np.uint8), b"x", None], dtype=object),
    "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True)],
    "plain": ([1, 2.5, True, None, "text", b"", b"bytes"], {"a", "b"}, frozenset({1}), (1, 2, 3, 4), 1 << 70),
    "ordered": OrderedDict(b=1, a=2),
    7: "number",
}


def load(folder: Path, content: bytes) -> Any:
    path = folder / "data.pkl"
    path.write_bytes(content)
    return load_pickle(path)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")  # numpy may bring it into native order
        assert found.shape == expected.shape
        for one, other in zip(found.ravel().tolist(), expected.ravel().tolist(), strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_data_comes_through_whole(tmp_path: Path, protocol: int) -> None:
    assert_same(load(tmp_path, pickle.dumps(DATA, protocol)), DATA)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_old_and_new_numpy_names_are_known(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(DATA["pixels"], protocol)
    if protocol < 4:  # later protocols have lengths of names in them
        for new, old in ((b"numpy._core", b"numpy.core"), (b"numpy.core", b"numpy._core")):
            assert_same(load(tmp_path, content.replace(new, old)), DATA["pixels"])
    else:
        short = content.replace(b"\x16numpy._core.multiarray", b"\x15numpy.core.multiarray")
        short = short.replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")
        frame = len(short) - 11  # behind the protocol and the length of the frame
        assert_same(load(tmp_path, short[:3] + frame.to_bytes(8, "little") + short[11:]), DATA["pixels"])


def test_python2_pickles(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    small = np.arange(4, dtype=np.int64)
    found = load(tmp_path, python2_pickle({"image_data": pixels, "small": small, "class_dict": {"n01": [0, 2]}}))
    assert_same(found, {"image_data": pixels, "small": small, "class_dict": {"n01": [0, 2]}})


class Calls:
    """Pickles to a call of a function, as an attacker would write it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_calls_are_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    sentinel = tmp_path / "was_run"
    touch = f"touch {sentinel}"
    attacks = {
        "system": Calls(os.system, touch),
        "eval": Calls(eval, f"open({str(sentinel)!r}, 'w')"),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "numpy": Calls(np.save, str(sentinel), np.zeros(1)),
        "Path.touch": Calls(Path.touch, Path(sentinel)),
    }
    for name, attack in attacks.items():
        with pytest.raises(TridentError, match="refused") as raised:
            load(tmp_path, pickle.dumps([np.zeros(2), attack], protocol))
        assert "\n" not in str(raised.value)
        assert name in ("numpy", "Path.touch") or name in str(raised.value)
    assert not sentinel.exists()


FORGED = {
    "name with control characters": b"\x80\x04\x8c\x03o\ns\x8c\x04\x1b[2J\x93.",
    "name with a dot": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.__new__\x93.",
    "instance": b"(ios\nsystem\nU\x04true.",
    "obj": b"(cos\nsystem\nU\x04trueo.",
    "new object": b"\x80\x02cnumpy\ndtype\n)\x81.",
    "persistent id": b"P0\n.",
    "extension code": b"\x80\x02\x82\x01.",
    "state for a function": b"\x80\x02c_codecs\nencode\n}U\x0b__wrapped__K\x01sb.",
    "state for a class": b"\x80\x02cnumpy\ndtype\n}U\x04codeK\x01sb.",
    "state for a list": b"\x80\x02]}U\x01aK\x01sb.",
    "codec": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
    "record type": b"\x80\x02cnumpy\ndtype\nU\x02V8K\x00K\x01\x87R.",
    "record state": b"\x80\x02cnumpy\ndtype\nU\x02u8K\x00K\x01\x87R(K\x03U\x01|NU\x01aNK\x08K\x08K\x00tb.",
    "array subclass": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R.",
    "object pointers from bytes": python2_pickle(np.arange(1, dtype=np.int64)).replace(b"U\x02i8", b"U\x02O8"),
    "too few bytes": python2_pickle(np.arange(4, dtype=np.uint8)).replace(b"(J\x04", b"(J\x09"),
    "negative shape": python2_pickle(np.zeros((1, 1), np.uint8)).replace(b"J\x01\x00\x00\x00", b"J\xff\xff\xff\xff"),
    "state for an array that has one": python2_pickle(np.arange(4, dtype=np.uint8))[:-1] + b")b.",
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_forged_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TridentError) as raised:
        load(tmp_path, content)
    assert str(raised.value).isprintable()


def test_claimed_sizes_take_no_memory(tmp_path: Path) -> None:
    assert load(tmp_path, b"\x80\x02Nr\xff\xff\xff\x7f.") is None  # the C machine takes 32 GB for this
    for content in (b"\x80\x05\x96" + b"\xff" * 5 + b"\x00" * 3 + b"ab.", b"\x80\x04\x8e" + b"\xff" * 8 + b"ab."):
        with pytest.raises(TridentError, match="not a whole pickle"):
            load(tmp_path, content)


def test_damaged_files_get_one_line(tmp_path: Path) -> None:
    whole = pickle.dumps(DATA, 4)
    for content in (b"", b"\n", b"not a pickle", whole[: len(whole) // 2], whole[:-1], b"<html>"):
        with pytest.raises(TridentError, match="not a whole pickle") as raised:
            load(tmp_path, content)
        assert "\n" not in str(raised.value)
    with pytest.raises(TridentError, match="cannot read"):
        load_pickle(tmp_path / "missing.pkl")


PLAIN_TYPES = (type(None), bool, int, float, str, bytes, np.generic)


def assert_plain(value: Any, seen: set[int]) -> None:
    """Nothing but data, and at most stand-ins of the unpickler's own that a mutation has left without their content."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            assert_plain(key, seen)
            assert_plain(item, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            assert_plain(item, seen)
    elif isinstance(value, np.ndarray):
        assert type(value) is np.ndarray
        if value.dtype.hasobject:
            assert_plain(value.ravel().tolist(), seen)
    elif value not in (OrderedDict, set, frozenset):
        own = "trident.data.unpickle"
        assert isinstance(value, PLAIN_TYPES) or own in (type(value).__module__, getattr(value, "__module__", None))


def load_or_refuse(folder: Path, content: bytes) -> None:
    try:
        value = load(folder, content)
    except TridentError as error:
        assert "\n" not in str(error)
    else:
        assert_plain(value, set())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@given(content=st.binary(max_size=80))
@settings(max_examples=300)
def test_random_bytes(folder: Path, content: bytes) -> None:
    load_or_refuse(folder, content)


VALID = [pickle.dumps(DATA, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
VALID.append(python2_pickle({"image_data": DATA["pixels"], "class_dict": {"n01": [0, 1]}}))


@given(
    content=st.sampled_from(VALID),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 2000)),
)
@settings(max_examples=600)
def test_mutated_pickles(folder: Path, content: bytes, changes: list[tuple[int, int]], cut: int | None) -> None:
    mutated = bytearray(content)
    for place, byte in changes:
        mutated[place % len(mutated)] = byte
    load_or_refuse(folder, bytes(mutated[:cut]))


def test_arrays_with_permuted_axes_come_back_as_they_were(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(1, 2, 0)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "array.pkl").write_bytes(pickle.dumps(array, protocol))
        assert np.array_equal(load_pickle(tmp_path / "array.pkl"), array)
