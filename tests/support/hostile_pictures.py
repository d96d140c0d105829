"""Small files that take long or much memory to decode."""

import io
import struct
import zlib

from PIL import Image

_MPF = (  # a marker after which Pillow calls the file an MPO of two pictures
    b"II*\0" + struct.pack("<IHHHI4sHHIIHHIII", 8, 3, 0xB000, 7, 4, b"0100", 0xB001, 4, 1, 2, 0xB002, 7, 32, 50, 0)
).ljust(50, b"\0") + struct.pack("<IIIHHIIIHH", 0x030000, 1000, 0, 0, 0, 0, 1000, 0, 0, 0)


def many_scans(scans: int, side: int = 7000, mpo: bool = False) -> bytes:
    """A progressive JPEG that goes over the whole picture so often. 100 scans of 7000x7000 take seconds."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True, quality=50)
    content = file.getvalue()
    first = content.index(b"\xff\xc4", content.index(b"\xff\xda"))  # the table of the first scan with details
    start = content.index(b"\xff\xda", first)
    end = content.index(b"\xff\xc4", start)
    marker = b"\xff\xe2" + struct.pack(">H", 2 + 4 + len(_MPF)) + b"MPF\0" + _MPF if mpo else b""
    return content[:2] + marker + content[2:end] + content[start:end] * scans + content[end:]


def tiles_of_the_same_data(height: int = 2_000_000, tile: int = 2048) -> bytes:
    """A TIFF one pixel wide whose tiles are all the same few bytes, each decoded to millions of pixels."""
    packed = zlib.compress(bytes(tile * tile), 9)
    packed += b"\0" * (len(packed) % 2)
    n = -(-height // tile)
    places, sizes = (struct.pack(f"<{n}I", *[value] * n) for value in (8, len(packed)))
    at = 8 + len(packed)
    tags = [(256, 4, 1, 1), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]
    tags += [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, n, at), (325, 4, n, at + len(places))]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    directory = at + len(places) + len(sizes)
    start = b"II*\0" + struct.pack("<I", directory) + packed + places + sizes
    return start + struct.pack("<H", len(tags)) + entries + bytes(4)
