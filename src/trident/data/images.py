"""One image: its source, and how it is decoded to the requested size."""

import hashlib
import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from typing import Protocol, runtime_checkable
from zipfile import BadZipFile

import numpy as np
from PIL import Image, UnidentifiedImageError

from trident.data.jpeg_scans import MOST_SCANS, has_more_scans
from trident.errors import TridentError
from trident.files import open_regular, read_regular

# Pillow knows many more formats, and some call other programs. Only these are tried, whatever a file's name.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# What Pillow may have found with them. MPO is a JPEG followed by others: phones save them, and the first one is read.
_JPEGS = ("JPEG", "MPO")
_FOUND = frozenset({*_FORMATS, *_JPEGS, "DIB"})
_HEIC = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftypheim", b"ftyphevc")
MOST_BYTES = 2**28  # of a picture's file, and of a picture in an archive
MOST_PIXELS = 89_478_485  # of a picture, unless a smaller number is given: where Pillow begins to warn
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"}
)

# The errors that Pillow's decoders raise on damaged files.
_DECODING_ERRORS = (
    OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, RuntimeError, ArithmeticError, MemoryError,
    StructError, zlib.error, BadZipFile, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip

_new_key = partial(hashlib.blake2b, digest_size=20)
_ORIENTATION_TAG = 0x0112  # EXIF: how the camera was held
_TILE_WIDTH_TAG, _TILE_HEIGHT_TAG = 322, 323
_TILE_PIXELS = 2**22  # always allowed for all tiles together; 2**16 for each one are common
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
        """A hash of the content; the name does not matter. Raises UnreadableImageError."""
        ...


@runtime_checkable
class EncodedImage(ImageSource, Protocol):
    """An image in the bytes of an image file, which another process can decode."""

    def portable(self) -> "ImageContent":
        """The same image with its content in memory."""
        ...


class DatasetImage(EncodedImage, Protocol):
    """An image of a dataset on disk."""

    @property
    def file(self) -> Path:
        """The file that it is in, perhaps with other images."""
        ...


@dataclass(frozen=True, slots=True)
class ImageContent:
    """An image in memory: its pixels (height, width, 3) uint8, or the bytes of an image file."""

    name: str
    content: np.ndarray | bytes

    def portable(self) -> "ImageContent":
        return self

    def open(self) -> Image.Image:
        if isinstance(self.content, np.ndarray):
            return Image.fromarray(self.content)
        return open_image(self.content)

    def key(self) -> bytes:
        if isinstance(self.content, bytes):
            return key_of(self.content)
        return key_of_pixels(self.open())


class ImageBytes(ABC):
    """An image in the bytes of an image file: a file of its own, or a part of another, such as an archive."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def content(self) -> bytes:
        """The bytes of the image file."""

    def portable(self) -> ImageContent:
        return ImageContent(self.name, self.content())

    def open(self) -> Image.Image:
        return open_image(self.content())

    def key(self) -> bytes:
        with naming_errors(self):
            return key_of(self.content())


@dataclass(frozen=True, slots=True)
class ImageFile(ImageBytes):
    """An image file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def file(self) -> Path:
        return self.path

    def content(self) -> bytes:
        return read_regular(self.path, MOST_BYTES)

    def key(self) -> bytes:
        with naming_errors(self), open_regular(self.path, MOST_BYTES) as file:
            return hashlib.file_digest(file, _new_key).digest()


def in_memory(source: ImageSource) -> ImageSource:
    """An image whose bytes are read now, once: its key is that of the very bytes that are decoded."""
    with naming_errors(source):
        return source.portable() if isinstance(source, ImageBytes) else source


def open_image(content: bytes) -> Image.Image:
    """Open an image file, given by its content, in one of the supported formats."""
    try:
        image = Image.open(BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError as error:
        if content[4:12] in _HEIC:
            raise ValueError("HEIC pictures cannot be read here: save it as JPEG or PNG") from error
        raise
    try:
        _check(image, content)
    except BaseException:
        image.close()
        raise
    return image


def _check(image: Image.Image, content: bytes) -> None:
    """Refuse what would take long or much memory to decode, as far as the header tells."""
    if image.format not in _FOUND:
        raise UnidentifiedImageError
    if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):  # Pillow only warns
        raise Image.DecompressionBombError
    if image.format in _JPEGS and has_more_scans(content):
        raise ValueError(f"this JPEG has more than {MOST_SCANS} scans and takes too long to decode: save it again")
    if image.format == "TIFF":
        # Tiles are always decoded completely, but Pillow limits only the size of the picture.
        tags = image.tag_v2  # type: ignore[attr-defined]
        width, height = tags.get(_TILE_WIDTH_TAG, 0), tags.get(_TILE_HEIGHT_TAG, 0)
        if width > 0 and height > 0:
            tiles = -(-image.width // width) * -(-image.height // height) * width * height
            if tiles > max(2 * image.width * image.height, _TILE_PIXELS):
                raise ValueError("its tiles have far more pixels than the picture, too many to be safe: save it again")


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
    digest = _new_key()
    for part in content:
        digest.update(part)
    return digest.digest()


def key_of_pixels(image: Image.Image) -> bytes:
    """A hash of what `decode` sees of a picture in memory: also its palette, transparency and orientation."""
    pixels = _to_eight_bits(_upright(image), "RGB")
    return key_of(f"{image.mode} {pixels.size} ".encode(), pixels.tobytes())


def decode(
    source: ImageSource,
    size: int,
    channels: int,
    inverted: bool = False,
    *,
    reduced: bool = False,
    middle: float = 1.0,
    pixels: int = MOST_PIXELS,
) -> np.ndarray:
    """Decode one image to (size, size, channels) uint8.

    EXIF orientation is applied, and transparent pixels become white. An image of another size is resized with a Lanczos
    filter until its shorter side fits, and cropped at the centre. With `inverted` dark becomes bright. With `reduced`
    a JPEG is decoded at a half, a quarter or an eighth of its size if that is still twice the size wanted: much faster
    for photographs of many megapixels, and almost the same pixels. `middle` is the part of the centre square that is
    kept, of its height and width. An image with more than `pixels` is an error.

    The work is not limited. Untrusted pictures are decoded by `DecodingProcesses`.
    """
    with naming_errors(source), _opened(source, pixels) as image:
        if reduced:
            image.draft(None, (2 * size, 2 * size))  # does nothing in other formats
        image.load()
        found = np.asarray(_fit(_to_eight_bits(_upright(image), "RGB" if channels == 3 else "L"), size, middle))
    found = found.reshape(size, size, channels)
    return 255 - found if inverted else found


@dataclass(frozen=True)
class Target:
    """What images are decoded to: (size, size, channels) uint8; see `decode`."""

    size: int
    channels: int
    inverted: bool = False
    reduced: bool = False
    middle: float = 1.0
    pixels: int = MOST_PIXELS

    def decode(self, source: ImageSource) -> np.ndarray:
        return decode(source, **vars(self))


def _opened(source: ImageSource, pixels: int) -> Image.Image:
    try:
        image = source.open()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(_too_many(pixels)) from error
    if image.width * image.height > pixels:
        image.close()
        raise ValueError(_too_many(pixels))
    return image


def _too_many(pixels: int) -> str:
    return f"it has more than {pixels:,} pixels, too many to be safe: shrink it first"


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is not an image in a known format"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return _too_many(MOST_PIXELS)
    if isinstance(error, MemoryError) or "out of memory" in str(error):
        return "it needs too much memory to be decoded"
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
