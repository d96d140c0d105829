"""What a visitor sends: class names, labelled pictures and the pile. Pictures are decoded one by one as they arrive.

The fields of a request are `class` (a name; as many as there are classes), `labelled-0`, `labelled-1` ... (pictures of
the first class, of the second ...) and `pile`, in any order. `tab` may be given: a random number of the sender's own.
With the same number, pictures that were sent before are labelled faster.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
from starlette.requests import ClientDisconnect

from trident.data.images import ImageContent, Target, UnreadableImageError, key_of
from trident.labelling.class_names import class_name
from trident.labelling.corrections import mark_of
from trident.web.decoder import PageDecoder
from trident.web.limits import Limits, RefusedError, megabytes
from trident.web.parts import Part, PartReader

_DRAIN_SECONDS = 3.0


@dataclass(frozen=True)
class Received:
    """A picture at the network's input size, or why it cannot be read."""

    name: str
    pixels: np.ndarray | None  # (size, size, channel) uint8
    error: str | None = None
    mark: str = ""  # of its content, for the table


@dataclass
class Upload:
    classes: list[str] = field(default_factory=list)
    labelled: list[tuple[int, Received]] = field(default_factory=list)  # (class index, picture)
    pile: list[Received] = field(default_factory=list)
    tab: str = ""


@dataclass(frozen=True)
class Receiver:
    """Reads requests, and scales pictures to the network's input size."""

    limits: Limits
    target: Target
    decoder: PageDecoder

    async def receive(self, stream: AsyncIterator[bytes], content_type: str, content_length: str | None) -> Upload:
        if content_length is not None and content_length.isdecimal():
            self.limits.check_size(int(content_length))
        reader = PartReader(content_type, self.limits.file_bytes)
        upload, received = Upload(), 0
        async for data in stream:
            received += len(data)  # a chunked body has no length header
            self.limits.check_size(received)
            for part in reader.feed(data):
                await self._take(part, upload)
        reader.close()
        _check_classes(upload)
        return upload

    async def _take(self, part: Part, upload: Upload) -> None:
        if part.field == "class":
            if len(upload.classes) >= self.limits.classes:
                raise RefusedError(413, f"more than {self.limits.classes} classes: send fewer")
            upload.classes.append(class_name("" if part.too_big else part.content.decode("utf-8", "replace")))
            return
        if part.field == "tab":
            upload.tab = _tab(part)
            return
        labelled = re.fullmatch(r"labelled-(\d{1,4})", part.field)
        if labelled is None and part.field != "pile":
            raise RefusedError(422, f"unknown field '{part.field[:50]}': there are class, labelled-N, pile and tab")
        self.limits.check_pictures(len(upload.labelled) + (labelled is not None), len(upload.pile) + (labelled is None))
        picture = await self._picture(part)
        if labelled is None:
            upload.pile.append(picture)
        else:
            upload.labelled.append((int(labelled[1]), picture))

    async def _picture(self, part: Part) -> Received:
        name = (part.filename or "a picture without a name")[-200:]
        if part.too_big:
            most = megabytes(self.limits.file_bytes)
            return Received(name, None, f"{name}: it has more than {most}: shrink it first")
        source = ImageContent(name, bytes(part.content))
        try:
            pixels = await self.decoder.decode(source, self.target)
            return Received(name, pixels, mark=mark_of(source, key_of(bytes(part.content))))
        except UnreadableImageError as error:
            return Received(name, None, str(error))


def _tab(part: Part) -> str:
    """It must be long, so that nobody guesses that of another visitor."""
    found = part.content.decode("utf-8", "replace")
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise RefusedError(422, "tab must have 32 hexadecimal digits")
    return found


def _check_classes(upload: Upload) -> None:
    twice = [name for place, name in enumerate(upload.classes) if name in upload.classes[:place]]
    if twice:
        raise RefusedError(422, f"there are two classes '{twice[0]}': give each a name of its own")
    if len(upload.classes) < 2:
        raise RefusedError(422, "at least 2 classes are needed to choose from")
    if any(place >= len(upload.classes) for place, _ in upload.labelled):
        raise RefusedError(422, f"there are labelled pictures of a class that has no name: there are {upload.classes}")


async def drain(stream: AsyncIterator[bytes]) -> None:
    """Let the client finish sending for a while: most clients read the answer only then."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in stream:
                pass
    except (TimeoutError, ClientDisconnect):
        pass
