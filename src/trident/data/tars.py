"""Pictures in tar archives, such as WebDataset's shards. They are read where they lie; nothing is unpacked.

An archive is read once from start to end, header by header, to know where its pictures are. A picture's bytes are read
when it is needed. A member's name is only a name: no file is ever made from it, so it can do no harm.
"""

import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath

from trident.data.images import IMAGE_SUFFIXES, MOST_BYTES, ImageSource
from trident.data.pictures import UniqueNames
from trident.files import MOST_DATA, open_regular

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_LARGEST_HEADER = 2**20  # bytes; long names and attributes of a member are in further headers
_PREFIXES = (".", "__MACOSX")  # of members that archivers add by themselves


@dataclass(frozen=True, slots=True)
class TarPicture(ImageSource):
    """A picture in an archive that is not compressed."""

    archive: Path
    member: str
    offset: int  # where its bytes begin
    size: int

    @property
    def name(self) -> str:
        return f"{self.archive}/{self.member}"

    def content(self) -> bytes:
        if self.size > MOST_BYTES:
            raise ValueError(f"it has {self.size} bytes: {MOST_BYTES} at most can be read from an archive")
        with open_regular(self.archive, MOST_DATA) as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise ValueError("the archive ends before this picture does")
        return content


def tar_pictures(archives: Iterable[Path]) -> tuple[list[TarPicture], dict[str, str]]:
    """The pictures in these archives, in their order there; and a message for each archive that cannot be read."""
    pictures: list[TarPicture] = []
    unread: dict[str, str] = {}
    for archive in archives:
        if archive.suffix.lower() != ".tar":
            unread[str(archive)] = f"{archive}: it is compressed, so single pictures cannot be read: decompress it"
            continue
        names = UniqueNames()
        try:
            for member in _members(archive):
                pictures.append(
                    TarPicture(archive, names.unique(member.name.removeprefix("./")), member.offset_data, member.size)
                )
        except (OSError, tarfile.TarError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "it is damaged"
            unread[str(archive)] = f"{archive}: the archive cannot be read to its end: {why}"
    return pictures, unread


class _Headers(BufferedReader):
    """An archive as tarfile reads it here: only headers, which are small, whatever size they state."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        return super().read(size)


def _members(archive: Path) -> Iterator[tarfile.TarInfo]:
    """The pictures among the members. Links, folders, other files and hidden ones are skipped."""
    raw = _Headers(open_regular(archive, MOST_DATA).detach())
    with raw, tarfile.open(fileobj=raw, mode="r:", errorlevel=1) as file:
        size = os.fstat(raw.fileno()).st_size
        for member in file:
            file.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
            path = PurePosixPath(member.name)
            if member.offset_data + (member.size if member.isreg() else 0) > size:
                raise tarfile.ReadError("it is cut short")
            hidden = any(part.startswith(_PREFIXES) and part != ".." for part in path.parts)
            if not hidden and member.isreg() and not member.issparse() and path.suffix.lower() in IMAGE_SUFFIXES:
                yield member
        # At a damaged header tarfile stops as if that were the end, which is a block of zeros.
        raw.seek(file.offset)
        if raw.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("it is damaged after the last picture that was found")
