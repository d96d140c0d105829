"""The cache of features: what it finds, deletes and repairs."""

import os
import pickle
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from cache_rows import WIDTH, damage, key, numbers_in, row, rows
from trident.labelling.feature_cache import DEFAULT_LIMIT, FeatureCache


def test_it_finds_what_was_stored_after_it_is_opened_again(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "a" / "folder")
    assert (cache.problem, cache.limit) == (None, DEFAULT_LIMIT)
    assert numbers_in(cache) == []
    cache.put("a", rows(1, 2))
    cache.put("b", rows(2, 3))
    again = FeatureCache(tmp_path / "a" / "folder")
    assert numbers_in(again) == [1, 2]
    assert numbers_in(again, "b") == [2, 3]
    assert numbers_in(again, "c") == []
    assert again.size() == (4, 4 * 4 * WIDTH)
    again.put("a", {})
    assert again.get("a", [], WIDTH) == {}
    assert len(again.get("a", [key(1), key(1), key(9)], WIDTH)) == 1
    assert numbers_in(pickle.loads(pickle.dumps(again))) == [1, 2]


def test_many_rows_come_fast(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    features = np.random.default_rng(0).standard_normal((5000, 1280)).astype(np.float32)
    cache.put("a", {key(number): one for number, one in enumerate(features)})
    keys = [key(number) for number in range(5001)]
    start = time.process_time()
    found = cache.get("a", keys, 1280)
    assert time.process_time() - start < 0.7  # 0.1 on an idle core
    assert len(found) == 5000
    assert np.array_equal(np.stack([found[name] for name in keys[:5000]]), features)


def test_rows_of_the_wrong_size_or_not_finite_are_ignored(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1) | {key(2): np.full(WIDTH, np.nan, np.float32), key(3): np.full(WIDTH, np.inf, np.float32)})
    assert numbers_in(cache) == [1]
    assert cache.size()[0] == 1
    assert cache.get("a", [key(1)], WIDTH + 1) == {}
    cache.put("a", {key(1): row(1, WIDTH + 1)})
    assert cache.get("a", [key(1)], WIDTH) == {}
    assert numbers_in(cache, width=WIDTH + 1) == [1]
    cache.put("a", {key(4): row(4).astype(np.float64)})
    assert numbers_in(cache) == [4]


def test_the_least_recently_used_rows_are_deleted_first(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, limit=5 * 4 * WIDTH)
    for number in range(5):
        cache.put("a", rows(number))
    assert cache.get("a", [key(0), key(2)], WIDTH).keys() == {key(0), key(2)}  # used once more
    cache.put("a", rows(5, 6))
    assert cache.size() == (5, 5 * 4 * WIDTH)
    assert numbers_in(cache) == [0, 2, 4, 5, 6]
    cache.get("a", [key(0)], WIDTH)
    cache.put("b", rows(*range(4)))
    assert numbers_in(cache) == [0]
    assert numbers_in(cache, "b") == [0, 1, 2, 3]
    cache.put("a", rows(*range(20)))  # more than fit at once
    assert cache.size()[0] == 5
    FeatureCache(tmp_path, limit=2 * 4 * WIDTH).put("a", rows(30))
    assert cache.size()[0] == 2


def test_the_file_stays_small_while_rows_come_and_go(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, limit=200 * 4 * 1280)
    for start in range(0, 1000, 20):
        cache.put("a", {key(number): row(number, 1280) for number in range(start, start + 20)})
    assert cache.path.stat().st_size < 1.3 * cache.limit


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = FeatureCache(tmp_path / "folder")
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
        assert cache.path.stat().st_mode & 0o777 == 0o600
        with sqlite3.connect(cache.path) as database:  # a transaction has a second file
            database.execute("DELETE FROM pictures")
            assert {path.stat().st_mode & 0o777 for path in cache.path.parent.iterdir()} == {0o600}
        cache.path.chmod(0o644)
        FeatureCache(tmp_path / "folder").put("a", rows(1))
        assert cache.path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("how", ["random bytes", "truncated", "first page", "schema", "another's"])
def test_a_damaged_file_is_set_aside_and_made_anew(tmp_path: Path, how: str) -> None:
    said: list[str] = []
    cache = FeatureCache(tmp_path, say=said.append)
    cache.put("a", {key(number): row(number, 1280) for number in range(50)})
    damage(cache.path, how)
    damaged = cache.path.read_bytes()
    assert numbers_in(cache) == []  # while it is used, and not only when it is opened
    cache.put("a", rows(1))
    assert numbers_in(FeatureCache(tmp_path, say=said.append)) == [1]
    (line,) = said
    assert "\n" not in line and f"{cache.path} was damaged (" in line and "features.sqlite.damaged" in line
    assert (tmp_path / "features.sqlite.damaged").read_bytes() == damaged
    damage(cache.path, how)  # once more: one file is kept
    cache.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["features.sqlite"]
    assert (len(said), cache.size(), cache.problem) == (2, (0, 0), None)


def test_the_cache_of_another_version_is_left_alone(tmp_path: Path) -> None:
    FeatureCache(tmp_path)
    damage(tmp_path / "features.sqlite", "another version")
    content = (tmp_path / "features.sqlite").read_bytes()
    problem = FeatureCache(tmp_path).problem
    assert problem is not None and "cannot be used (its version is 99, not 1: delete it" in problem
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [content]


def test_the_statistics_of_sqlite_are_no_damage(tmp_path: Path) -> None:
    FeatureCache(tmp_path).put("a", rows(1))
    with sqlite3.connect(tmp_path / "features.sqlite") as database:
        database.execute("ANALYZE")
    assert numbers_in(FeatureCache(tmp_path)) == [1]


def test_a_file_that_may_not_be_written_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FeatureCache(tmp_path)
    content = bytearray(cache.path.read_bytes())
    content[18] = 9  # SQLite takes this for read-only, too
    cache.path.write_bytes(content)
    monkeypatch.setattr(os, "access", lambda *_: False)
    cache.put("a", rows(1))
    assert cache.problem is not None and "cannot be used (attempt to write a readonly database)" in cache.problem
    assert [path.name for path in tmp_path.iterdir()] == ["features.sqlite"]


def test_without_anybody_to_tell_it_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "features.sqlite").write_bytes(b"no database at all" * 9)
    with pytest.warns(UserWarning, match=r"was damaged \(file is not a database\)"):
        FeatureCache(tmp_path)
    (tmp_path / "features.sqlite").write_bytes(b"")  # as after a crash of the machine
    FeatureCache(tmp_path).put("a", rows(1))
    assert numbers_in(FeatureCache(tmp_path)) == [1]


def test_another_process_has_set_it_aside_already(tmp_path: Path) -> None:
    """Its new file is not taken for the damaged one."""
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1))
    before = cache.path.stat()
    cache.path.rename(tmp_path / "features.sqlite.damaged")
    FeatureCache(tmp_path).put("a", rows(2))
    cache._replace(before, "malformed")
    assert numbers_in(cache) == [2]


def test_one_damaged_byte(tmp_path: Path) -> None:
    """No traceback, no features of another picture, and afterwards a cache that works."""
    cache = FeatureCache(tmp_path, say=lambda line: None)
    cache.put("a", rows(*range(20)))
    content = cache.path.read_bytes()
    for place in [18, 19, *range(47, len(content), 1499)]:
        cache.path.write_bytes(content[:place] + bytes([content[place] ^ 0x85]) + content[place + 1 :])
        numbers_in(cache)  # checks what it finds
        cache.put("a", rows(50))
        numbers_in(cache)
        cache.clear()
        cache.put("a", rows(1))
        assert numbers_in(cache) == [1]


def test_features_of_another_picture_are_not_found(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1, 2, 3))
    with sqlite3.connect(cache.path) as database:  # as a damaged index would lead there
        database.execute("UPDATE features SET id = -id")
        database.execute("UPDATE features SET id = 4 + id")
    assert numbers_in(cache) == [2]


def test_a_flipped_bit_is_noticed_and_repaired(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1, 2))
    content, wanted = bytearray(cache.path.read_bytes()), row(1).tobytes()
    content[content.index(wanted) + 5] ^= 1
    cache.path.write_bytes(content)
    assert numbers_in(cache) == [2]
    cache.put("a", rows(1))
    assert numbers_in(cache) == [1, 2]
    assert cache.size()[0] == 2


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "features.sqlite").mkdir(parents=True)
    for folder in (tmp_path / "file" / "folder", tmp_path / "taken"):
        cache = FeatureCache(folder)
        assert cache.problem is not None
        assert str(folder) in cache.problem and "cannot be used" in cache.problem and "\n" not in cache.problem
        cache.put("a", rows(1))
        assert cache.get("a", [key(1)], WIDTH) == {}
        cache.clear()
        assert cache.problem is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    for folder in (tmp_path / "locked", tmp_path / "locked" / "below"):
        problem = FeatureCache(folder).problem
        assert problem is not None and "cannot be used" in problem


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1))
    connect = sqlite3.connect

    def with_few_pages(*arguments: object, **options: object) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        database.execute("PRAGMA max_page_count = 12")
        return database

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", with_few_pages)
        cache.put("a", {key(number): row(number, 1280) for number in range(2, 50)})
    assert cache.problem is not None
    assert "full" in cache.problem and "\n" not in cache.problem
    assert numbers_in(FeatureCache(tmp_path)) == [1]  # of the put that failed, nothing is left


def test_it_is_made_again_if_it_was_deleted_meanwhile(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "folder")
    cache.put("a", rows(1))
    cache.path.unlink()
    cache.path.parent.rmdir()
    cache.put("a", rows(2))
    assert numbers_in(cache) == [2]


def test_clear_deletes_all(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", {key(number): row(number, 1280) for number in range(100)})
    before = cache.path.stat().st_size
    cache.clear()
    assert cache.size() == (0, 0)
    assert cache.path.stat().st_size < before / 10
    assert row(5, 1280).tobytes()[:100] not in cache.path.read_bytes()
    cache.put("a", rows(1))
    assert numbers_in(cache) == [1]
