"""Several processes and the command that use the cache of features."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ablation_grids import Answer
from cache_rows import damage, key, numbers_in, row, rows
from commands import assert_one_line_error
from trident.labelling.feature_cache import FeatureCache, cache_folder

WRITER = """
import sys
from pathlib import Path

import numpy as np

from trident.labelling.feature_cache import FeatureCache

cache = FeatureCache(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    features = np.random.default_rng(number).standard_normal(8).astype(np.float32)
    cache.put("a", {number.to_bytes(20, "big"): features})
    cache.get("a", [other.to_bytes(20, "big") for other in range(100)], 8)
    assert cache.problem is None, cache.problem
    print(number, flush=True)
"""


def writer(folder: Path, start: int, stop: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(start), str(stop)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once(tmp_path: Path) -> None:
    with writer(tmp_path, 0, 30) as first, writer(tmp_path, 30, 60) as second:
        said = [process.communicate(timeout=60) for process in (first, second)]
    assert [(first.returncode, second.returncode), said[0][1], said[1][1]] == [(0, 0), "", ""]
    assert numbers_in(FeatureCache(tmp_path)) == list(range(60))


def test_a_killed_process_leaves_what_it_had_stored(tmp_path: Path) -> None:
    with writer(tmp_path, 0, 10**6) as process:
        assert process.stdout is not None
        done = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        done += [int(line) for line in process.stdout.read().splitlines()]
    assert process.returncode == -signal.SIGKILL
    cache = FeatureCache(tmp_path)
    found = numbers_in(cache, up_to=done[-1] + 10)
    assert found[: len(done)] == done
    assert len(found) <= len(done) + 1  # the last may be stored, but not told
    cache.put("a", rows(10**7))
    assert cache.problem is None


def test_a_writer_that_dies_in_the_middle_is_undone(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1))
    program = (
        "import os, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"  # so that half of it is in the file already
        "database.execute('BEGIN IMMEDIATE')\n"
        "database.execute('DELETE FROM pictures')\n"
        "database.executemany('INSERT INTO features VALUES (?, 0, zeroblob(9000))', [(n,) for n in range(10, 200)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(cache.path)])
    assert cache.path.with_name("features.sqlite-journal").exists()
    assert numbers_in(FeatureCache(tmp_path)) == [1]


def test_a_file_system_without_locks_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would wait for 20 seconds, and say that the database is locked."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refused)
    assert "cannot be used (No locks available)" in str(FeatureCache(tmp_path).problem)
    assert list(tmp_path.iterdir()) == []


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRIDENT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "trident"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_folder() == tmp_path / "caches" / "trident"
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trident_here: Callable[..., Answer]) -> None:
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path))
    FeatureCache(tmp_path).put("a", {key(number): row(number, 1280) for number in range(1000)})
    said = trident_here("data", "cache").stdout
    assert str(tmp_path) in said and "1,000" in said and "5.1 MB of at most 2,147 MB" in said
    assert '"pictures": 1000, "bytes": 5120000' in trident_here("data", "cache", "--json").stdout
    assert "deleted the features of 1,000 pictures" in trident_here("data", "cache", "--clear").stdout
    assert '"pictures": 0, "bytes": 0' in trident_here("data", "cache", "--json").stdout
    for arguments in ((), ("--clear",)):
        damage(tmp_path / "features.sqlite", "schema")
        answer = trident_here("data", "cache", *arguments)
        assert answer.returncode == 0 and answer.stderr.count("\n") == 1 and "was damaged" in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["features.sqlite"]
    (tmp_path / "features.sqlite").unlink()
    (tmp_path / "features.sqlite").mkdir()
    assert_one_line_error(trident_here("data", "cache"), "cannot be used")
