"""Decoding one image: size, colour, orientation, and files that are damaged or too big."""

import zlib
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from PIL import Image

from data_pictures import picture, save
from trident.data.images import ImageFile, UnreadableImageError, decode, strict_pillow


def decoded(path: Path, size: int = 84, channels: int = 3, inverted: bool = False) -> np.ndarray:
    with strict_pillow():
        return decode(ImageFile(path), size, channels, inverted)


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


def test_broken_exif_data_leaves_the_picture_readable(tmp_path: Path) -> None:
    Image.fromarray(picture(3)).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09garbage")
    assert decoded(tmp_path / "a.jpg").shape == (84, 84, 3)


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


def test_a_bomb_is_not_decoded(tmp_path: Path) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))

    for side in (10_000, 60_000):  # where Pillow warns, and where it refuses
        header = pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        pixels = zlib.compress(bytes(1000))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
        (tmp_path / "bomb.png").write_bytes(bomb)
        assert "too many to be safe" in reason(tmp_path / "bomb.png")


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
