"""The user's own pictures: in nested folders, listed in a file, or in memory as images, arrays or tensors."""

import codecs
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trident.data.images import IMAGE_SUFFIXES, ImageFile, ImageInMemory, ImageSource
from trident.errors import BadValueError, TridentError
from trident.files import read_regular

_CHANNELS = (1, 3, 4)

# Picture formats that cannot be decoded here. They are reported, not ignored.
_OTHER_PICTURES = frozenset(
    {".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".psd", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".ico"}
)


def find_pictures(folder: Path, without: Iterable[Path] = ()) -> tuple[list[ImageFile], dict[str, str]]:
    """The pictures in a folder and its subfolders, sorted by path; and a message for each path that cannot be read.

    Hidden files and folders, the folders in `without`, links to folders, and other files are skipped.
    """
    pictures: list[ImageFile] = []
    unread: dict[str, str] = {}
    excluded = {path.resolve() for path in without}

    def note(error: OSError) -> None:
        unread[str(error.filename)] = f"{error.filename}: {error.strerror}"

    for where, folders, files in os.walk(folder, onerror=note):
        seen = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        folders[:] = [name for name in seen if (Path(where) / name).resolve() not in excluded]
        for name in sorted(files):
            path = Path(where) / name
            if name.startswith("."):
                continue
            if not path.is_file():
                if path.is_symlink() and path.suffix.lower() in IMAGE_SUFFIXES:
                    unread[str(path)] = f"{path}: a link that leads nowhere"
                continue
            if path.suffix.lower() in IMAGE_SUFFIXES:
                pictures.append(ImageFile(path))
            elif path.suffix.lower() in _OTHER_PICTURES:
                kind = path.suffix.lower().removeprefix(".").upper()
                unread[str(path)] = f"{path}: {kind} pictures cannot be read here: save it as JPEG or PNG"
    return pictures, unread


def listed_pictures(path: Path) -> list[ImageFile]:
    """The pictures that a text file lists, one path on each line. A path that is listed twice counts once."""
    text = read_regular(path)
    if b"\0" in text:
        raise TridentError("that is not a text file; a list of pictures has one path on each line")
    lines = os.fsdecode(text.removeprefix(codecs.BOM_UTF8)).split("\n")
    paths = dict.fromkeys(Path(line.rstrip("\r")) for line in lines if line.strip())
    return [ImageFile(path) for path in paths]


def sources_of(images: Any) -> list[ImageSource]:
    """Accepts paths, PIL images, arrays or tensors in a list, or one array of all pictures.

    An array is uint8, or floating point from 0 to 1. Its channels come first or last, or it has none.
    """
    if isinstance(images, str | bytes | os.PathLike | Image.Image):
        raise BadValueError(f"images are {type(images).__name__}, a single one: give a list of them")
    if hasattr(images, "toarray"):
        raise BadValueError(f"images are a sparse {type(images).__name__}: give a dense array")
    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()  # a tensor
    if isinstance(images, np.ndarray) and images.dtype.kind not in "OU":
        if images.ndim == 3 and {images.shape[0], images.shape[2]} & set(_CHANNELS):
            raise BadValueError(f"images are an array of shape {images.shape}, a single one: give images[None]")
        if images.ndim not in (3, 4):
            raise BadValueError(
                f"images are an array of shape {images.shape}: it must be (image, height, width, channel), (image, "
                "channel, height, width) or (image, height, width)"
            )
        # Find the channel axis once for all, so that a height of 3 pixels is not mistaken for 3 channels.
        images = list(images if images.ndim == 3 else _channels_last(images))
    return [_source(image, f"image {place}") for place, image in enumerate(images)]


def _source(image: Any, name: str) -> ImageSource:
    if isinstance(image, str | os.PathLike):
        return ImageFile(Path(image))
    if isinstance(image, Image.Image):
        return ImageInMemory(name, image)
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    array = np.asarray(image)
    if array.ndim == 3:
        array = _channels_last(array[None])[0]
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise BadValueError(f"{name} is an array of shape {array.shape}: it must have a height, a width and channels")
    return ImageInMemory(name, Image.fromarray(_eight_bits(array, name)))


def _channels_last(images: np.ndarray) -> np.ndarray:
    """Channels first or last -> (image, height, width, channel)."""
    if images.shape[-1] in _CHANNELS:
        return images
    if images.shape[1] in _CHANNELS:
        return np.moveaxis(images, 1, -1)
    raise BadValueError(f"images have the shape {images.shape[1:]}: 1, 3 or 4 channels are expected, first or last")


def _eight_bits(array: np.ndarray, name: str) -> np.ndarray:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if np.iscomplexobj(array):
        raise BadValueError(f"Complex data not supported: {name} is of {array.dtype}, it must be uint8 or 0 to 1")
    if not np.issubdtype(array.dtype, np.floating):
        raise BadValueError(f"{name} is of {array.dtype}: it must be uint8, or floating point from 0 to 1")
    if not np.isfinite(array).all():
        raise BadValueError(f"{name} holds NaN or inf: give values from 0 to 1, or uint8 from 0 to 255")
    if array.min() < 0 or array.max() > 1:
        raise BadValueError(f"{name} has values outside 0 to 1: give values from 0 to 1, or uint8 from 0 to 255")
    return (array * 255).round().astype(np.uint8)
