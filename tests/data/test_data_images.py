"""Decoding one image: size, colour, orientation, and files that are damaged or too big."""

import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_pictures import picture, save
from trident.data.images import ImageFile, Target, UnreadableImageError, silence_pillow


def decoded(path: Path, size: int = 84, channels: int = 3, inverted: bool = False) -> np.ndarray:
    return Target(size, channels, inverted).decode(ImageFile(path))


def test_an_image_of_the_right_size_is_kept_as_it_is(tmp_path: Path) -> None:
    pixels = picture(0)
    assert np.array_equal(decoded(save(tmp_path / "a.png", pixels)), pixels)


@pytest.mark.parametrize(("height", "width"), [(84, 200), (200, 84), (168, 400), (300, 126)])
def test_the_shorter_side_is_fitted_and_the_middle_kept(tmp_path: Path, height: int, width: int) -> None:
    pixels = picture(1, height, width)
    scale = 84 / min(height, width)
    scaled = Image.fromarray(pixels).resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    left, top = (scaled.width - 84) // 2, (scaled.height - 84) // 2
    middle = np.asarray(scaled.crop((left, top, left + 84, top + 84)))
    assert np.abs(decoded(save(tmp_path / "a.png", pixels)).astype(int) - middle).max() <= 1


def test_a_small_image_is_enlarged(tmp_path: Path) -> None:
    assert decoded(save(tmp_path / "a.png", picture(2, 3, 1))).shape == (84, 84, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = picture(3)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(decoded(tmp_path / "a.png"), upright)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_broken_exif_data_leaves_the_picture_readable(tmp_path: Path) -> None:
    assert decoded(save_with_broken_exif(tmp_path / "a.jpg")).shape == (84, 84, 3)


def test_colour_modes(tmp_path: Path) -> None:
    grey = picture(4)[:, :, 0]
    as_rgb = np.repeat(grey[:, :, None], 3, axis=2)
    assert np.array_equal(decoded(save(tmp_path / "grey.png", grey)), as_rgb)
    assert np.array_equal(decoded(save(tmp_path / "deep.png", grey.astype(np.uint16) << 8)), as_rgb)
    clear = np.dstack([picture(4), np.zeros((84, 84), np.uint8)])
    assert (decoded(save(tmp_path / "clear.png", clear)) == 255).all()
    Image.fromarray(picture(4)).quantize(16).save(tmp_path / "palette.gif")
    assert decoded(tmp_path / "palette.gif").shape == (84, 84, 3)
    Image.fromarray(picture(4)).convert("CMYK").save(tmp_path / "cmyk.jpg")
    assert np.abs(decoded(tmp_path / "cmyk.jpg").astype(int) - picture(4)).mean() < 4
    with pytest.raises(UnreadableImageError, match="save it with 8 bits"):
        decoded(save(tmp_path / "float.tif", np.linspace(0, 1, 84 * 84, dtype=np.float32).reshape(84, 84)))


def test_ink_becomes_bright(tmp_path: Path) -> None:
    drawing = np.full((105, 105), 255, np.uint8)
    drawing[30:75, 30:75] = 0
    Image.fromarray(drawing).convert("1").save(tmp_path / "a.png")
    pixels = decoded(tmp_path / "a.png", 28, 1, inverted=True)
    assert pixels.shape == (28, 28, 1)
    assert pixels[14, 14] == 255
    assert pixels[0, 0] == 0
    assert 0.15 < pixels.mean() / 255 < 0.22


def reason(path: Path) -> str:
    with pytest.raises(UnreadableImageError) as raised:
        decoded(path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.jpg", picture(5, 300)).read_bytes()
    for count in (len(whole) // 2, len(whole) - 40, 3, 0):
        (tmp_path / "cut.jpg").write_bytes(whole[:count])
        reason(tmp_path / "cut.jpg")
    whole = save(tmp_path / "a.png", picture(5, 300)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    reason(tmp_path / "cut.png")
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    assert "not an image" in reason(tmp_path / "page.jpg")
    assert "No such file" in reason(tmp_path / "missing.jpg")


def test_only_image_formats_are_tried_whatever_the_name(tmp_path: Path) -> None:
    Image.fromarray(picture(6)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    assert "not an image" in reason(tmp_path / "a.jpg")


def save_bomb(path: Path, side: int) -> Path:
    def chunk(name: bytes, content: bytes) -> bytes:
        return pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))

    header, pixels = pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), zlib.compress(bytes(1000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    return path


def save_with_broken_exif(path: Path) -> Path:
    Image.fromarray(picture(3)).save(path, exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09garbage")
    return path


@pytest.mark.parametrize("filtered", ["default", "ignore", "error"])
@pytest.mark.parametrize("side", [10_000, 60_000])  # where Pillow warns, and where it refuses
def test_a_bomb_is_not_decoded_whatever_the_filter_of_warnings(tmp_path: Path, side: int, filtered: Any) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter(filtered, Image.DecompressionBombWarning)
        assert "too many to be safe" in reason(save_bomb(tmp_path / "bomb.png", side))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore:Corrupt EXIF:UserWarning")
def test_decoding_is_the_same_from_any_thread(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{seed}.png", picture(seed, 60 + seed)) for seed in range(4)]
    paths += [save_with_broken_exif(tmp_path / "odd.jpg"), save_bomb(tmp_path / "bomb.png", 10_000)]
    paths.append(tmp_path / "missing.png")

    def outcome(path: Path) -> bytes | str:
        try:
            return decoded(path).tobytes()
        except UnreadableImageError as error:
            return str(error)

    filters = list(warnings.filters)
    expected = [outcome(path) for path in paths]
    assert [isinstance(one, str) for one in expected] == [False] * 5 + [True] * 2
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(outcome, paths * 20)) == expected * 20
    assert list(warnings.filters) == filters


def test_pillow_can_be_silenced_and_bombs_are_refused_all_the_same(tmp_path: Path) -> None:
    odd, bomb = save_with_broken_exif(tmp_path / "odd.jpg"), save_bomb(tmp_path / "bomb.png", 10_000)
    for silent in (False, True):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if silent:
                silence_pillow()
            decoded(odd)
            assert "too many to be safe" in reason(bomb)
        assert len(said) == (0 if silent else 2)


def test_a_tile_far_larger_than_its_picture_is_not_decoded(tmp_path: Path) -> None:
    def tiff(tile: int) -> Path:
        tags = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: tile * tile}
        entries = b"".join(pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        content = bytes(256) if tile == 16 else b""
        path = tmp_path / f"{tile}.tif"
        path.write_bytes(b"II*\0" + pack("<I", 8 + len(content)) + content + pack("<H", len(tags)) + entries + bytes(4))
        return path

    assert decoded(tiff(16)).max() == 0
    with pytest.raises(UnreadableImageError, match="too many to be safe"):
        decoded(tiff(4096))
