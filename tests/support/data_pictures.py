"""Small real pictures and pickles for the tests of the dataset readers."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trident.data.prepare import prepare
from trident.data.store import ImageStore
from trident.errors import TridentError


def picture(seed: int, height: int = 84, width: int | None = None) -> np.ndarray:
    """A picture with some structure, so that a JPEG of it looks like one of a photograph."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width or height, height), Image.Resampling.BICUBIC))


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def png(pixels: np.ndarray) -> np.ndarray:
    """The bytes of a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


def save_class_folders(root: Path, classes: Mapping[str, int], size: int = 84) -> Path:
    """PNG pictures in class folders, as many as each class is given here."""
    for place, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save(root / name / f"{number:03d}.png", picture(100 * place + number, size))
    return root


def save_split(path: Path, **classes: Sequence[str]) -> Path:
    path.write_text(json.dumps(classes))
    return path


def table(store: ImageStore) -> dict[str, tuple[str, int]]:
    """The split and the number of images of each class."""
    return {entry.name: (entry.split, entry.count) for entry in store.classes}


def refusal(name: str, source: Path, split_file: Path | None = None) -> str:
    """The one line that is told about a dataset that cannot be prepared, after which nothing has been written."""
    with pytest.raises(TridentError) as raised:
        prepare(name, source, source.parent / "refused.st", split_file=split_file)
    assert "\n" not in str(raised.value)
    assert not list(source.parent.glob("*refused.st*"))
    return str(raised.value)


def python2_pickle(value: Any) -> bytes:
    """What cPickle of Python 2 writes with protocol 2, for the values that datasets are made of."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(_python2(item) for item in value) + b"e"
    if isinstance(value, int):
        return b"J" + pack("<i", value)
    if isinstance(value, str | bytes):
        raw = value.encode("latin1") if isinstance(value, str) else value
        return (b"U" + pack("<B", len(raw)) if len(raw) < 256 else b"T" + pack("<i", len(raw))) + raw
    assert isinstance(value, np.ndarray)
    code = value.dtype.str[1:]
    dtype = b"cnumpy\ndtype\n(" + _python2(code) + b"K\x00K\x01tR(K\x03" + _python2(value.dtype.str[0]) + b"NNN"
    dtype += _python2(-1) + _python2(-1) + b"K\x00tb"
    shape = b"(" + b"".join(_python2(length) for length in value.shape) + b"t"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + _python2("b") + b"tR"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + _python2(value.tobytes()) + b"tb"
