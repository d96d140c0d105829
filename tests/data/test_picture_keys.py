"""Pictures are known by their content."""

import io
import os
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from data_pictures import picture, save
from trident.data.benchmarks import PickleCache
from trident.data.images import MOST_BYTES, ImageFile, ImageInMemory, ImageSource, UnreadableImageError, in_memory
from trident.data.omniglot import ZippedImage
from trident.data.pictures import sources_of


def sources_with_the_same_content(folder: Path, seed: int) -> list[list[ImageSource]]:
    """Pictures in groups; those of a group have the same content in different places."""
    pixels = picture(seed, 20)
    first, second = save(folder / f"{seed}.png", pixels), save(folder / "below" / f"{seed}.png", pixels)
    archives = [folder / f"{name}{seed}.zip" for name in "ab"]
    for path in archives:
        with ZipFile(path, "w") as archive:
            archive.writestr("drawing.png", first.read_bytes())
    cache = PickleCache(lambda path: [pixels, np.frombuffer(first.read_bytes(), np.uint8)])
    return [
        [
            ImageFile(first),
            ImageFile(second),
            *(ZippedImage(ZipFile(path), "drawing.png") for path in archives),
            *cache.sources(folder / "a.pickle", [1]),
        ],
        [
            ImageInMemory("a", Image.fromarray(pixels)),
            *sources_of([pixels, pixels / 255]),
            *cache.sources(folder / "a.pickle", [0]),
        ],
    ]


def test_pictures_are_known_by_their_content(tmp_path: Path) -> None:
    groups = [group for seed in range(3) for group in sources_with_the_same_content(tmp_path, seed)]
    keys = [{source.key() for source in group} for group in groups]
    assert [len(found) for found in keys] == [1] * 6
    assert len(set.union(*keys)) == 6
    assert {len(found) for found in set.union(*keys)} == {20}


def test_pictures_sent_to_the_page_are_known_by_their_content() -> None:
    from trident.web.uploads import Received

    same = [Received(name, picture(0)).key() for name in "ab"]
    assert same[0] == same[1] == ImageInMemory("c", Image.fromarray(picture(0))).key()
    assert Received("a", picture(1)).key() != same[0]
    with pytest.raises(UnreadableImageError, match="it is no picture"):
        Received("a", None, "it is no picture").key()


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
    keys = [ImageInMemory("one", one).key() for one in different]
    assert len(set(keys)) == len(keys)
    assert keys == [ImageInMemory("other", one).key() for one in different]


def test_a_picture_that_cannot_be_read_has_no_key(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImageError, match=r"nothing\.jpg: No such file"):
        ImageFile(tmp_path / "nothing.jpg").key()
    os.mkfifo(tmp_path / "fifo.jpg")
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    (tmp_path / "folder.jpg").mkdir()
    for name, why in {
        "fifo.jpg": "it is not an ordinary file",
        "/dev/zero": "it is not an ordinary file",
        "sparse.jpg": "it has more than 268435456 bytes",
        "folder.jpg": "Is a directory",
    }.items():
        for read in (ImageFile.key, in_memory):
            with pytest.raises(UnreadableImageError, match=f"{name}: {why}"):
                read(ImageFile(tmp_path / name))
    with pytest.raises(UnreadableImageError, match="save it with 8 bits"):
        ImageInMemory("deep", Image.fromarray(np.zeros((4, 4), np.float32))).key()
    whole = io.BytesIO()
    Image.fromarray(picture(0)).save(whole, "JPEG")
    with pytest.raises(UnreadableImageError, match="image 3: "):
        ImageInMemory("image 3", Image.open(io.BytesIO(whole.getvalue()[:-300]))).key()
