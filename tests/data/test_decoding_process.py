"""Pictures that take too long or too much memory to decode: one line for each, and the rest goes on."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ablation_grids import Answer
from commands import run_trident
from data_pictures import picture, png, save_class_folders
from hostile_pictures import many_scans, tiles_of_the_same_data
from trident.data import decoding_process
from trident.data.decoding_process import DecodingProcesses, KilledError, TooSlowError, decoded, decoders
from trident.data.images import (
    MOST_PIXELS,
    ImageFile,
    ImageInMemory,
    ImageSource,
    Target,
    UnreadableImageError,
    has_more_scans,
)
from trident.errors import ResumableError
from web_server import until

TARGET = Target(20, 3)
ORDINARY = ImageInMemory("ordinary", png(picture(0)).tobytes())


@pytest.fixture
def processes() -> Iterator[DecodingProcesses]:
    found = DecodingProcesses()
    yield found
    found.close()


@pytest.fixture(scope="module")
def slow() -> ImageInMemory:
    """As many scans as are allowed, of many pixels: about two seconds."""
    return ImageInMemory("slow", many_scans(80))


def pids(processes: DecodingProcesses) -> list[int]:
    return [one.process.pid for one in (*processes._free, *processes._busy)]


def test_pixels_and_errors_are_those_of_decoding_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(png(picture(1, 30)).tobytes())
    (tmp_path / "b.png").write_bytes(b"no picture")
    transparent = io.BytesIO()
    Image.new("LA", (30, 40), (100, 50)).save(transparent, "PNG")
    sources: list[ImageSource] = [ImageFile(tmp_path / name) for name in ("a.png", "b.png", "none.png")]
    sources += [ORDINARY, ImageInMemory("t", transparent.getvalue()), ImageInMemory("e", b"")]
    for target in (
        TARGET,
        Target(33, 1, inverted=True),
        Target(8, 3, reduced=True, centre_crop=0.5),
        Target(8, 3, pixels=9),
    ):
        for source in sources:
            try:
                expected: np.ndarray | str = target.decode(source)
            except UnreadableImageError as error:
                expected = str(error)
                with pytest.raises(UnreadableImageError) as raised:
                    decoders.decode(source, target)
                assert str(raised.value) == expected
            else:
                np.testing.assert_array_equal(decoders.decode(source, target), expected)
    monkeypatch.chdir(tmp_path)  # a process that was started elsewhere finds the file
    np.testing.assert_array_equal(decoders.decode(ImageFile(Path("a.png")), TARGET), TARGET.decode(sources[0]))


def test_what_takes_too_long_is_ended_and_the_next_one_is_decoded(
    processes: DecodingProcesses, slow: ImageInMemory
) -> None:
    before = processes.decode(ORDINARY, TARGET)
    (first,) = pids(processes)
    began = time.monotonic()
    with pytest.raises(TooSlowError, match=r"^slow: it took too long to decode: save it again, or smaller$"):
        processes.decode(slow, TARGET, 0.3)
    assert time.monotonic() - began < 5
    np.testing.assert_array_equal(processes.decode(ORDINARY, TARGET), before)
    assert pids(processes) != [first]
    (second,) = pids(processes)
    processes.decode(ORDINARY, TARGET)
    assert pids(processes) == [second]  # it is kept


def test_limits_grow_with_the_picture(processes: DecodingProcesses, slow: ImageInMemory) -> None:
    """The same work is allowed in a picture of many pixels, which may need it."""
    assert processes.decode(slow, TARGET).shape == (20, 20, 3)
    assert decoding_process._seconds(50_000_000) < 10


def test_memory_is_limited(processes: DecodingProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pixels that the header does not tell of: here the limit is made lower than what an honest picture needs."""
    file = io.BytesIO()
    Image.new("RGB", (9000, 9000)).save(file, "PNG", compress_level=1)
    large = ImageInMemory("large", file.getvalue())
    patch = "import trident.data.decoding_process as d; d._BYTES, d._BYTES_PER_PIXEL = 2**26, 1"
    (tmp_path / "sitecustomize.py").write_text("")
    (tmp_path / "low.py").write_text(patch)
    monkeypatch.setattr(decoding_process, "_PROGRAM", "import low; " + decoding_process._PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnreadableImageError, match=r"^large: it needs too much memory to be decoded$"):
        processes.decode(large, TARGET)
    assert processes.decode(ORDINARY, TARGET).shape == (20, 20, 3)


def test_large_pictures_wait_for_each_other(processes: DecodingProcesses) -> None:
    """And small ones for none. The limit of memory holds for all of them together."""
    file = io.BytesIO()
    Image.new("L", (1100, 1000)).save(file, "PNG")
    with ThreadPoolExecutor(1) as other:
        with processes._room.taken(MOST_PIXELS - 1_000_000):
            large = other.submit(processes.decode, ImageInMemory("large", file.getvalue()), TARGET)
            assert until(lambda: bool(processes._room._changed._waiters))  # type: ignore[attr-defined]
            assert processes.decode(ORDINARY, TARGET).shape == (20, 20, 3) and not large.done()
        assert large.result().shape == (20, 20, 3)
    assert processes._room._free == MOST_PIXELS


def test_a_very_large_picture_is_not_overtaken() -> None:
    room, done = decoding_process._Room(), []

    def take(pixels: int) -> None:
        with room.taken(pixels):
            done.append(pixels)

    with ThreadPoolExecutor(2) as others, room.taken(2_000_000):
        others.submit(take, MOST_PIXELS)
        assert until(lambda: bool(room._changed._waiters))  # type: ignore[attr-defined]
        others.submit(take, 2_000_001)
        assert not until(lambda: bool(done), 0.02)
        take(0)
    assert done == [0, MOST_PIXELS, 2_000_001]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mpo.jpg", many_scans(300, 800, mpo=True), "more than 100 scans"),
        ("scans.jpg", many_scans(300, 800), "more than 100 scans"),
        ("tiles.tif", tiles_of_the_same_data(), "far more pixels than the picture"),
    ],
)
def test_known_bombs_are_refused_by_their_headers(name: str, content: bytes, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(UnreadableImageError, match=words):
        decoders.decode(ImageInMemory(name, content), TARGET)
    assert time.monotonic() - began < 2


def test_an_ordinary_mpo_is_read_and_other_formats_are_not() -> None:
    file = io.BytesIO()
    first, second = (Image.fromarray(picture(seed)) for seed in (1, 2))
    first.save(file, "MPO", save_all=True, append_images=[second])
    with Image.open(file) as image:
        assert image.format == "MPO"
    alone = io.BytesIO()
    first.save(alone, "JPEG")
    found, expected = (decoders.decode(ImageInMemory("a", one.getvalue()), TARGET) for one in (file, alone))
    np.testing.assert_array_equal(found, expected)
    for kind in ("ICO", "TGA", "PCX", "JPEG2000"):
        other = io.BytesIO()
        first.save(other, kind)
        with pytest.raises(UnreadableImageError, match="not an image in a known format"):
            decoders.decode(ImageInMemory("picture.jpg", other.getvalue()), TARGET)


def test_scans_are_counted_to_the_end_of_the_picture() -> None:
    content = many_scans(5, 80)
    n = content.count(b"\xff\xda")
    assert not has_more_scans(content, n) and has_more_scans(content, n - 1)
    film = content + b"\xff\xda\0\x08" * 1000  # phones append one
    assert not has_more_scans(film, n)
    assert not has_more_scans(b"", 0)


def test_a_process_that_is_killed_does_not_cost_a_picture(processes: DecodingProcesses, slow: ImageInMemory) -> None:
    """The first time. If it ends again, the picture is to blame."""

    def kill(times: int) -> None:
        for _ in range(times):
            assert until(lambda: bool(processes._busy))
            (busy,) = pids(processes)
            os.kill(busy, signal.SIGKILL)
            assert until(lambda: pids(processes) != [busy])  # noqa: B023

    with ThreadPoolExecutor(1) as other:
        killed = other.submit(kill, 1)
        assert processes.decode(slow, TARGET).shape == (20, 20, 3)
        killed.result()
        killed = other.submit(kill, 2)
        with pytest.raises(KilledError, match=r"^slow: the process that decoded it ended \(SIGKILL\)$"):
            processes.decode(slow, TARGET)
        killed.result()


def test_a_system_without_memory_is_not_the_picture_s_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is prepared already is not thrown away."""
    monkeypatch.setattr(decoding_process, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    pets = [ImageFile(path) for path in save_class_folders(tmp_path, {"a": 2}, 20).rglob("*.png")]
    monkeypatch.setattr(decoding_process, "_BATCH_BYTES", 1)
    with pytest.raises(ResumableError, match="perhaps because memory ran out"):
        list(decoded(pets, TARGET, 2))


def test_what_a_process_answers_is_not_believed(processes: DecodingProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture may have taken it over."""
    for answer in ("(0, 5) + bytes(5)", "(7, 5) + bytes(5)", "(1, 2**31)", "(2, 5) * 2"):
        head, _, rest = answer.partition(")")
        program = f"import os, struct, sys; os.write(1, struct.pack('<BI', *{head})){rest} ); sys.stdin.buffer.read()"
        monkeypatch.setattr(decoding_process, "_PROGRAM", program)
        with pytest.raises(UnreadableImageError, match="gave no sensible answer"):
            processes.decode(ORDINARY, TARGET)


def test_pixels_in_memory_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = DecodingProcesses()
    assert unused.decode(ImageInMemory("a", Image.fromarray(picture(0))), TARGET).shape == (20, 20, 3)
    assert unused.decode(ImageInMemory("a", picture(0)), TARGET).shape == (20, 20, 3)
    assert pids(unused) == []


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from trident.data.decoding_process import decoders\n"
        "decoders.start(2)\n"
        "print(*[one.process.pid for one in decoders._free], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    for pid in map(int, said.split()):
        assert until(lambda: not Path(f"/proc/{pid}").exists())  # noqa: B023


def test_several_at_once_and_one_of_them_hostile(tmp_path: Path, slow: ImageInMemory) -> None:
    sources = [ImageFile(path) for path in sorted(save_class_folders(tmp_path, {"a": 70}, 20).rglob("*.png"))]
    (tmp_path / "slow.jpg").write_bytes(many_scans(300, 800, mpo=True))
    sources.insert(30, ImageFile(tmp_path / "slow.jpg"))
    found = list(decoded(sources, TARGET, 2))
    assert [isinstance(one, UnreadableImageError) for one in found] == [place == 30 for place in range(71)]


def test_data_prepare_refuses_in_one_line(tmp_path: Path, trident_here: Callable[..., Answer]) -> None:
    pets = save_class_folders(tmp_path / "pets", {"train/ant": 2, "val/bee": 2, "test/cow": 2}, 20)
    (pets / "val" / "bee" / "001.png").write_bytes(tiles_of_the_same_data())
    answer = trident_here("data", "prepare", "folder", "--from", pets, "--to", tmp_path / "a.store")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1 and "001.png: its tiles have far more pixels" in answer.stderr


def test_predict_names_the_hostile_picture_and_labels_the_rest(tmp_path: Path, weights: Path) -> None:
    save_class_folders(tmp_path / "support", {"ant": 2, "bee": 2}, 20)
    pile = save_class_folders(tmp_path, {"pile": 4}, 20) / "pile"
    (pile / "mpo.jpg").write_bytes(many_scans(300, 800, mpo=True))
    began = time.monotonic()
    options = ("--support", "support", "--query", "pile", "--weights", weights, "--backbone", "conv4")
    answer = run_trident(tmp_path, "predict", *options)
    assert time.monotonic() - began < 40
    assert "mpo.jpg: this JPEG has more than 100 scans" in answer.stderr
    assert sum("pile/00" in line for line in answer.stdout.splitlines()) == 4
