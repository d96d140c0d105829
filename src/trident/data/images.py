"""One image: its source, and how it is decoded to the requested size."""

import hashlib
import math
import re
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from zipfile import BadZipFile

import numpy as np
from PIL import Image, UnidentifiedImageError

from trident.errors import TridentError
from trident.files import read_regular

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


# The bytes of an image file; or a picture that is decoded: (height, width, channel) uint8, or Pillow's.
Content = bytes | np.ndarray | Image.Image


class UnreadableImageError(TridentError):
    """An image that cannot be decoded. The message has its name and the reason."""


class ImageSource(ABC):
    """A picture that is not decoded yet, with a name for messages."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def content(self) -> Content: ...

    def open(self) -> Image.Image:
        return _opened(self.content())

    def key(self) -> bytes:
        """A hash of the content; the name does not matter. Raises UnreadableImageError."""
        with naming_errors(self.name):
            content = self.content()
            if isinstance(content, bytes):
                return key_of(content)
            image = _opened(content)
            pixels = _to_eight_bits(_upright(image), "RGB")  # its palette, transparency and orientation count
            return key_of(f"{image.mode} {pixels.size} ".encode(), pixels.tobytes())


class DatasetImage(ImageSource):
    """An image of a dataset on disk."""

    __slots__ = ()

    @property
    @abstractmethod
    def file(self) -> Path:
        """The file that it is in, perhaps with other images."""


@dataclass(frozen=True, slots=True)
class ImageInMemory(ImageSource):
    """A picture in memory."""

    name: str = field()  # without it, the property of the base class would be the default
    held: Content = field()

    def content(self) -> Content:
        return self.held


@dataclass(frozen=True, slots=True)
class ImageFile(DatasetImage):
    file: Path = field()

    @property
    def name(self) -> str:
        return str(self.file)

    def content(self) -> bytes:
        return read_regular(self.file, MOST_BYTES)


def in_memory(source: ImageSource) -> ImageInMemory:
    """A picture that is read now, once: its key is that of the very bytes that are decoded."""
    with naming_errors(source.name):
        return ImageInMemory(source.name, source.content())


def _opened(content: Content) -> Image.Image:
    if isinstance(content, bytes):
        return open_image(content)
    if isinstance(content, Image.Image):
        return content.copy()
    return Image.fromarray(content[:, :, 0] if content.shape[2:] == (1,) else content)


def open_image(content: bytes) -> Image.Image:
    """Open an image file, given by its content, in one of the supported formats."""
    if content[4:12] in _HEIC:
        raise ValueError("HEIC pictures cannot be read here: save it as JPEG or PNG")
    image = Image.open(BytesIO(content), formats=_FORMATS)
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
        n_tiles = -(-image.width // width) * -(-image.height // height) if width > 0 and height > 0 else 0
        if n_tiles * width * height > max(2 * image.width * image.height, _TILE_PIXELS):
            raise ValueError("its tiles have far more pixels than the picture, too many to be safe: save it again")


def silence_pillow() -> None:
    """Turn off Pillow's warnings about odd files in the whole process, because `decode` reports errors itself."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def naming_errors(name: str) -> Iterator[None]:
    """Turns the errors of Pillow and of files into an UnreadableImageError with the picture's name."""
    try:
        yield
    except _DECODING_ERRORS as error:
        raise UnreadableImageError(f"{name}: {_reason(error)}") from error


def key_of(*content: bytes) -> bytes:
    """A hash of a picture's content."""
    return hashlib.blake2b(b"".join(content), digest_size=20).digest()


@dataclass(frozen=True)
class Target:
    """What images are decoded to: (size, size, channels) uint8.

    EXIF orientation is applied, and transparent pixels become white. An image of another size is resized with a Lanczos
    filter until its shorter side fits, and cropped at the centre.
    """

    size: int
    channels: int
    inverted: bool = False  # dark becomes bright
    # A JPEG is decoded at a half, a quarter or an eighth of its size if that is still twice the size wanted: much
    # faster for photographs of many megapixels, and almost the same pixels.
    reduced: bool = False
    centre_crop: float = 1.0  # the part of the centre square that is kept, of its height and width
    pixels: int = MOST_PIXELS  # an image with more is an error

    def decode(self, source: ImageSource) -> np.ndarray:
        """The work is not limited. Untrusted pictures are decoded by `DecodingProcesses`."""
        return self.decode_opened(source.name, source.open)

    def decode_opened(self, name: str, opened: Callable[[], Image.Image]) -> np.ndarray:
        with naming_errors(name), self._checked(opened) as image:
            if self.reduced:
                image.draft(None, (2 * self.size, 2 * self.size))  # does nothing in other formats
            image.load()
            upright = _to_eight_bits(_upright(image), "RGB" if self.channels == 3 else "L")
            pixels = np.asarray(_fit(upright, self.size, self.centre_crop)).reshape(self.size, self.size, self.channels)
        return 255 - pixels if self.inverted else pixels

    def _checked(self, opened: Callable[[], Image.Image]) -> Image.Image:
        try:
            image = opened()
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(_too_many(self.pixels)) from error
        if image.width * image.height > self.pixels:
            image.close()
            raise ValueError(_too_many(self.pixels))
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


def _fit(image: Image.Image, size: int, centre_crop: float) -> Image.Image:
    if image.size == (size, size) and centre_crop == 1:
        return image
    width, height = image.size
    side = min(width, height) * centre_crop
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.LANCZOS, (left, top, left + side, top + side))


MOST_SCANS = 100  # of a JPEG; ten are usual. Each one goes over the whole picture, so thousands take minutes.

_START_OF_SCAN, _END = 0xDA, 0xD9
# In the data of a scan, 0xFF is followed by 0 if it is a number, by 0xD0 to 0xD7 at a restart, or it is filled up.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def has_more_scans(content: bytes, most: int = MOST_SCANS) -> bool:
    """Whether a JPEG file has more scans. What follows the picture, such as a film, is not counted."""
    scans, place = 0, 2  # after the marker of its start
    while scans <= most and (match := _MARKER.search(content, place)) and match[0][1] != _END:
        scans += match[0][1] == _START_OF_SCAN
        length = int.from_bytes(content[match.end() : match.end() + 2])
        place = match.end() + max(2, length)
    return scans > most
