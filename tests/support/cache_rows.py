"""Made-up rows of a cache of features."""

import random
import sqlite3
from pathlib import Path

import numpy as np

from trident.labelling.feature_cache import FeatureCache

WIDTH = 8  # features of a picture


def key(number: int) -> bytes:
    return number.to_bytes(20, "big")


def row(number: int, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(width).astype(np.float32)


def rows(*numbers: int) -> dict[bytes, np.ndarray]:
    return {key(number): row(number) for number in numbers}


def numbers_in(cache: FeatureCache, fingerprint: str = "a", width: int = WIDTH, up_to: int = 100) -> list[int]:
    found = cache.get(fingerprint, [key(number) for number in range(up_to)], width)
    assert cache.problem is None
    for name, features in found.items():
        assert features.dtype == np.float32
        assert np.array_equal(features, row(int.from_bytes(name, "big"), width))
    return [int.from_bytes(name, "big") for name in sorted(found)]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "random bytes":
        path.write_bytes(random.Random(0).randbytes(5000))
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "first page":
        path.write_bytes(content[:100] + bytes(4000) + content[4100:])
    elif how == "schema":
        path.write_bytes(content.replace(b"checksum INTEGER", b"checksu\xcc INTEGER"))
    elif how == "another version":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
    elif how == "another's":
        path.unlink()
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE pictures (name TEXT)")
