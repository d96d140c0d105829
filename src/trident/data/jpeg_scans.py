"""The number of scans of a JPEG. Each one goes over the whole picture, so thousands of them take minutes to decode."""

import re

MOST_SCANS = 100  # ten are usual

_START_OF_SCAN, _END = 0xDA, 0xD9
# In the data of a scan, 0xFF is followed by 0 if it is a number, by 0xD0 to 0xD7 at a restart, or it is filled up.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def has_more_scans(content: bytes, most: int = MOST_SCANS) -> bool:
    """Whether a JPEG file has more scans. What follows the picture, such as a film, is not counted."""
    scans, place = 0, 2  # after the marker of its start
    while found := _MARKER.search(content, place):
        kind = content[found.start() + 1]
        if kind == _END:
            return False
        if kind == _START_OF_SCAN:
            scans += 1
            if scans > most:
                return True
        length = int.from_bytes(content[found.end() : found.end() + 2])
        place = found.end() + max(2, length)
    return False
