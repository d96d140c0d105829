"""The cache of features: what it finds, what it forgets, and what it survives."""

import io
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from ablation_grids import Answer
from conftest import assert_one_line_error
from data_pictures import picture, png, save
from trident.data.images import ImageFile, ImageSource, UnreadableImageError
from trident.data.omniglot import ZippedImage
from trident.data.pickles import PickleCache
from trident.data.pictures import HeldImage, sources_of
from trident.labelling.feature_cache import DEFAULT_LIMIT, FeatureCache, cache_folder

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


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "random bytes":
        path.write_bytes(random.Random(0).randbytes(5000))
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "first page":
        path.write_bytes(content[:100] + bytes(4000) + content[4100:])
    elif how == "another version":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
    elif how == "another program's":
        path.unlink()
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE pictures (name TEXT)")


@pytest.mark.parametrize("how", ["random bytes", "truncated", "first page", "another version", "another program's"])
def test_a_damaged_file_is_reported_and_not_used(tmp_path: Path, how: str) -> None:
    FeatureCache(tmp_path).put("a", {key(number): row(number, 1280) for number in range(50)})
    damage(tmp_path / "features.sqlite", how)
    cache = FeatureCache(tmp_path)
    assert cache.get("a", [key(1)], 1280) == {}
    cache.put("a", rows(1))
    assert cache.size() == (0, 0)
    assert cache.problem is not None
    assert "\n" not in cache.problem
    assert str(tmp_path / "features.sqlite") in cache.problem
    assert "is damaged" in cache.problem and "trident cache --clear" in cache.problem
    cache.clear()
    assert cache.problem is None
    cache.put("a", rows(1))
    assert numbers_in(cache) == [1]


def test_damage_while_it_is_used(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("a", rows(1))
    damage(cache.path, "random bytes")
    assert cache.get("a", [key(1)], WIDTH) == {}
    assert cache.problem is not None
    empty = FeatureCache(tmp_path / "empty")
    empty.path.write_bytes(b"")  # as after a crash of the machine
    empty.put("a", rows(1))
    assert numbers_in(empty) == [1]


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
    said = trident_here("cache").stdout
    assert str(tmp_path) in said and "1,000" in said and "5.1 MB of at most 2,147 MB" in said
    assert '"pictures": 1000, "bytes": 5120000' in trident_here("cache", "--json").stdout
    assert "deleted the features of 1,000 pictures" in trident_here("cache", "--clear").stdout
    assert '"pictures": 0, "bytes": 0' in trident_here("cache", "--json").stdout
    damage(tmp_path / "features.sqlite", "random bytes")
    assert_one_line_error(trident_here("cache"), "is damaged", "trident cache --clear")
    assert trident_here("cache", "--clear").returncode == 0
    assert trident_here("cache").returncode == 0


def sources_with_the_same_content(folder: Path, seed: int) -> list[list[ImageSource]]:
    """Pictures in groups; those of a group have the same content in different places."""
    pixels = picture(seed, 20)
    first, second = save(folder / f"{seed}.png", pixels), save(folder / "below" / f"{seed}.png", pixels)
    archives = [folder / f"{name}{seed}.zip" for name in "ab"]
    for path in archives:
        with ZipFile(path, "w") as archive:
            archive.writestr("drawing.png", first.read_bytes())
    cache = PickleCache(lambda path: [pixels, png(pixels)])
    return [
        [ImageFile(first), ImageFile(second), *(ZippedImage(ZipFile(path), "drawing.png") for path in archives)],
        [
            HeldImage("a", Image.fromarray(pixels)),
            *sources_of([pixels, pixels / 255]),
            *cache.sources(folder / "a.pickle", [0, 1]),
        ],
    ]


def test_pictures_are_known_by_their_content(tmp_path: Path) -> None:
    groups = [group for seed in range(3) for group in sources_with_the_same_content(tmp_path, seed)]
    keys = [{source.key() for source in group} for group in groups]
    assert [len(found) for found in keys] == [1] * 6
    assert len(set.union(*keys)) == 6
    assert {len(found) for found in set.union(*keys)} == {20}


def test_pictures_sent_to_the_page_are_known_by_their_content() -> None:
    from trident.web.labels import _Held
    from trident.web.uploads import Received

    same = [_Held(Received(name, picture(0))).key() for name in "ab"]
    assert same[0] == same[1] == HeldImage("c", Image.fromarray(picture(0))).key()
    assert _Held(Received("a", picture(1))).key() != same[0]
    with pytest.raises(UnreadableImageError, match="it is no picture"):
        _Held(Received("a", None, "it is no picture")).key()


def test_what_changes_a_held_picture_changes_its_key() -> None:
    pixels = picture(0, 12, 6)
    image = Image.fromarray(pixels)
    turned = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 3
    turned.info["exif"] = exif.tobytes()
    palette = image.quantize(4)
    other_palette = palette.copy()
    other_palette.putpalette([255 - value for value in palette.getpalette() or []])
    clear = image.copy()
    clear.putalpha(100)
    changed = pixels.copy()
    changed[3, 3, 1] ^= 1
    different = [
        *(image, turned, palette, other_palette, clear, image.convert("L"), Image.fromarray(changed)),
        Image.fromarray(pixels.reshape(6, 12, 3)),
        Image.fromarray(pixels.reshape(12, 6, 3)[::-1].copy()),
    ]
    keys = [HeldImage("one", one).key() for one in different]
    assert len(set(keys)) == len(keys)
    assert keys == [HeldImage("other", one).key() for one in different]


def test_a_picture_that_cannot_be_read_has_no_key(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match=r"nothing\.jpg: No such file"):
        ImageFile(tmp_path / "nothing.jpg").key()
    with pytest.raises(UnreadableImageError, match="save it with 8 bits"):
        HeldImage("deep", Image.fromarray(np.zeros((4, 4), np.float32))).key()
    whole = io.BytesIO()
    Image.fromarray(picture(0)).save(whole, "JPEG")
    with pytest.raises(UnreadableImageError, match="image 3: "):
        HeldImage("image 3", Image.open(io.BytesIO(whole.getvalue()[:-300]))).key()
