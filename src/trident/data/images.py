"""One image: its source, and how it is decoded to the requested size."""

import hashlib
import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from typing import IO, Protocol
from zipfile import BadZipFile

import numpy as np
from PIL import Image, UnidentifiedImageError

from trident.errors import TridentError

# Pillow knows many more formats, and some call other programs. Only these are tried, whatever a file's name.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})

# The errors that Pillow's decoders raise on damaged files.
_DECODING_ERRORS = (
    OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, RuntimeError, ArithmeticError, MemoryError,
    StructError, zlib.error, BadZipFile, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip

_KEY_BYTES = 20
_ORIENTATION_TAG = 0x0112  # EXIF: how the camera was held
_TILE_WIDTH_TAG, _TILE_HEIGHT_TAG = 322, 323
_TILE_PIXELS = 2**22  # always allowed for a tile; 2**16 are common
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class UnreadableImageError(TridentError):
    """An image that cannot be decoded. The message has its name and the reason."""


class ImageSource(Protocol):
    """An image that is not decoded yet, with a name for messages."""

    @property
    def name(self) -> str: ...

    def open(self) -> Image.Image: ...

    def key(self) -> bytes:
        """The same for the same content, whatever the name. Raises UnreadableImageError."""
        ...


class DatasetImage(ImageSource, Protocol):
    """An image of a dataset on disk."""

    @property
    def file(self) -> Path:
        """The file that it is in, perhaps with other images."""
        ...

    def portable(self) -> ImageSource:
        """The same image as another process can open it: with its content, unless it is a file of its own."""
        ...


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def file(self) -> Path:
        return self.path

    def portable(self) -> "ImageFile":
        return self

    def open(self) -> Image.Image:
        return open_image(self.path)

    def key(self) -> bytes:
        with naming_errors(self):
            return key_of(self.path.read_bytes())


@dataclass(frozen=True, slots=True)
class ImageContent:
    """An image in memory: its pixels (height, width, 3) uint8, or the bytes of an image file."""

    name: str
    content: np.ndarray | bytes

    def open(self) -> Image.Image:
        if isinstance(self.content, np.ndarray):
            return Image.fromarray(self.content)
        return open_image(BytesIO(self.content))

    def key(self) -> bytes:
        with naming_errors(self), self.open() as image:
            return key_of_pixels(image)


class InnerImage(ABC):
    """An image whose bytes are a part of another file, such as an archive."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def content(self) -> bytes:
        """The bytes of the image file."""

    def open(self) -> Image.Image:
        return open_image(BytesIO(self.content()))

    def key(self) -> bytes:
        with naming_errors(self):
            return key_of(self.content())


def open_image(file: Path | IO[bytes]) -> Image.Image:
    """Open an image file in one of the supported formats."""
    image = Image.open(file, formats=_FORMATS)
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):  # Pillow only warns
        image.close()
        raise Image.DecompressionBombError
    if image.format == "TIFF":
        # A tile is always decoded completely, but Pillow limits only the size of the picture.
        tags = image.tag_v2  # type: ignore[attr-defined]
        tile = tags.get(_TILE_WIDTH_TAG, 0) * tags.get(_TILE_HEIGHT_TAG, 0)
        if tile > max(image.width * image.height, _TILE_PIXELS):
            image.close()
            raise Image.DecompressionBombError
    return image


def silence_pillow() -> None:
    """Turn off Pillow's warnings about odd files in a command or a server, because `decode` reports errors itself.

    This affects the whole process, because `warnings.catch_warnings` is not thread-safe.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def naming_errors(source: ImageSource) -> Iterator[None]:
    """Turns the errors of Pillow and of files into an UnreadableImageError with the picture's name."""
    try:
        yield
    except _DECODING_ERRORS as error:
        raise UnreadableImageError(f"{source.name}: {_reason(error)}") from error


def key_of(*content: bytes) -> bytes:
    """A hash of a picture's content."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in content:
        digest.update(part)
    return digest.digest()


def key_of_pixels(image: Image.Image) -> bytes:
    """A hash of what `decode` sees of a picture in memory: also its palette, transparency and orientation."""
    pixels = _to_eight_bits(_upright(image), "RGB")
    return key_of(f"{image.mode} {pixels.size} ".encode(), pixels.tobytes())


def decode(
    source: ImageSource, size: int, channels: int, inverted: bool = False, *, reduced: bool = False, middle: float = 1.0
) -> np.ndarray:
    """Decode one image to (size, size, channels) uint8.

    EXIF orientation is applied, and transparent pixels become white. An image of another size is resized with a Lanczos
    filter until its shorter side fits, and cropped at the centre. With `inverted` dark becomes bright. With `reduced`
    a JPEG is decoded at a half, a quarter or an eighth of its size if that is still twice the size wanted: much faster
    for photographs of many megapixels, and almost the same pixels. `middle` is the part of the centre square that is
    kept, of its height and width.
    """
    with naming_errors(source), source.open() as image:
        if reduced:
            image.draft(None, (2 * size, 2 * size))  # does nothing in other formats
        image.load()
        pixels = np.asarray(_fit(_to_eight_bits(_upright(image), "RGB" if channels == 3 else "L"), size, middle))
    pixels = pixels.reshape(size, size, channels)
    return 255 - pixels if inverted else pixels


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image in a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"it has more than {Image.MAX_IMAGE_PIXELS} pixels, too many to be safe: shrink it first"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except _DECODING_ERRORS:
        return image  # the pixels are fine; only the EXIF data is damaged
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _to_eight_bits(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range: save it with 8 bits")
    if image.mode.startswith("I"):  # Pillow would clip at 255
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits: save it with 8 bits")
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    return image.convert(mode)


def _fit(image: Image.Image, size: int, middle: float) -> Image.Image:
    if image.size == (size, size) and middle == 1:
        return image
    width, height = image.size
    side = min(width, height) * middle
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
