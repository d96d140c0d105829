"""What a visitor sends: class names, labelled pictures and the pile. Pictures are decoded one by one as they arrive.

The fields of a request are `class` (a name; as many as there are classes), `labelled-0`, `labelled-1` ... (pictures of
the first class, of the second ...) and `pile`, in any order. `tab` may be given: a random number of the sender's own.
With the same number, pictures that were sent before are labelled faster.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from python_multipart import multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from trident.data.decoding_process import DecodingProcesses, TooSlowError
from trident.data.images import ImageInMemory, ImageSource, Target, UnreadableImageError, key_of
from trident.labelling.class_names import check_one_class_each, class_name
from trident.labelling.tables import mark_of
from trident.web.limits import Limits, RefusedError, megabytes

TEXT_BYTES = 1000  # of a part that is not a picture

# The parser logs a line for each malformed body. The visitor gets it as an answer; nothing is logged about visitors.
logging.getLogger(multipart.__name__).addHandler(logging.NullHandler())
logging.getLogger(multipart.__name__).propagate = False


@dataclass
class Part:
    name: str = ""
    filename: str | None = None
    content: bytearray = field(default_factory=bytearray)
    too_big: bool = False  # then the content is cut short


class PartReader:
    """Parses a multipart body while it arrives. One part is in memory at a time, up to the allowed size.

    Starlette would write the pictures to disk, and read each one to its end, however large it is.
    """

    def __init__(self, content_type: str, file_bytes: int):
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise RefusedError(415, "the request must be multipart/form-data")
        self._file_bytes = file_bytes
        self._part = Part()
        self._whole: list[Part] = []
        self._header_name, self._header_value = bytearray(), bytearray()
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_header_field": self._name,
                    "on_header_value": self._value,
                    "on_header_end": self._header,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise RefusedError(400, f"the request cannot be read: {error}") from error

    def feed(self, data: bytes) -> list[Part]:
        """The parts that are complete after this piece."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RefusedError(400, f"the request cannot be read: {error}") from error
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        if not self._ended:
            raise RefusedError(400, "the request is incomplete")

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            self._part.name = _text(options.get(b"name", b""))
            if b"filename" in options:
                self._part.filename = _text(options[b"filename"])
        self._header_name.clear()
        self._header_value.clear()

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        picture = part.name == "pile" or part.name.startswith("labelled-")  # also one without a file name
        most = self._file_bytes if picture else TEXT_BYTES
        if len(part.content) + end - start > most:
            part.too_big = True
            part.content.clear()  # it will not be decoded
        if not part.too_big:
            part.content += data[start:end]

    def _end(self) -> None:
        self._whole.append(self._part)
        self._part = Part()

    def _finish(self) -> None:
        self._ended = True


def _text(raw: bytes) -> str:
    return " ".join(raw.decode("utf-8", "replace").split())


_QUICK_SECONDS = 0.5  # of processor time; a photograph of 12 megapixels takes less
_SECONDS = 4.0  # for the others
_QUICK, _PATIENT = 2, 1  # pictures at a time
_DRAIN_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Received(ImageSource):
    """A picture that was decoded on arrival, at the network's input size; or why it cannot be read."""

    name: str = field()  # without it, the property of the base class would be the default
    pixels: np.ndarray | None = field()  # (size, size, channel) uint8
    error: str | None = None
    mark: str = ""  # of its content, for the table

    def content(self) -> np.ndarray:
        if self.pixels is None:
            raise ValueError(self.error)
        return self.pixels


@dataclass
class Upload:
    """A request. When it is complete and checked, every class has a readable picture."""

    classes: list[str] = field(default_factory=list)
    labelled: list[tuple[int, Received]] = field(default_factory=list)  # (class index, picture)
    pile: list[Received] = field(default_factory=list)
    tab: str = ""

    def examples(self) -> list[np.ndarray]:
        """The labelled pictures that can be read, each (size, size, channel) uint8."""
        return [picture.pixels for _, picture in self.labelled if picture.pixels is not None]

    def labels(self) -> np.ndarray:
        """Of the examples: (example,) int64."""
        return np.array([place for place, picture in self.labelled if picture.pixels is not None], np.int64)

    def described_labelled(self) -> list[dict[str, Any]]:
        return [
            {"name": picture.name, "class": self.classes[place], "error": picture.error}
            for place, picture in self.labelled
        ]


class Receiver:
    """Reads requests, and scales pictures to the network's input size.

    Every picture is tried for a short time. One that takes longer begins anew and waits for others like it. So pictures
    that are made to take long hold up each other, and an ordinary one only for a moment.
    """

    def __init__(self, limits: Limits, target: Target, processes: DecodingProcesses):
        self.limits, self._target, self._processes = limits, target, processes
        self._quick = ThreadPoolExecutor(_QUICK, "decode")
        self._patient = ThreadPoolExecutor(_PATIENT, "decode-long")
        processes.start(1)  # while the network is loaded

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
        _check(upload)
        return upload

    async def _take(self, part: Part, upload: Upload) -> None:
        if part.name == "class":
            if len(upload.classes) >= self.limits.classes:
                raise RefusedError(413, f"more than {self.limits.classes} classes: send fewer")
            upload.classes.append(class_name("" if part.too_big else part.content.decode("utf-8", "replace")))
            return
        if part.name == "tab":  # long, so that nobody guesses that of another visitor
            upload.tab = part.content.decode("utf-8", "replace")
            if not re.fullmatch("[0-9a-f]{32}", upload.tab):
                raise RefusedError(422, "tab must have 32 hexadecimal digits")
            return
        labelled = re.fullmatch(r"labelled-(\d{1,4})", part.name)
        if labelled is None and part.name != "pile":
            raise RefusedError(422, f"unknown field '{part.name[:50]}': there are class, labelled-N, pile and tab")
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
        source = ImageInMemory(name, bytes(part.content))
        try:
            pixels = await self._decoded(source)
            return Received(name, pixels, mark=mark_of(source, key_of(bytes(part.content))))
        except UnreadableImageError as error:
            return Received(name, None, str(error))

    async def _decoded(self, source: ImageSource) -> np.ndarray:
        """Raises UnreadableImageError."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self._quick, self._processes.decode, source, self._target, _QUICK_SECONDS)
        except TooSlowError:
            return await run(self._patient, self._processes.decode, source, self._target, _SECONDS)


def _check(upload: Upload) -> None:
    twice = [name for place, name in enumerate(upload.classes) if name in upload.classes[:place]]
    if twice:
        raise RefusedError(422, f"there are two classes '{twice[0]}': give each a name of its own")
    if len(upload.classes) < 2:
        raise RefusedError(422, "at least 2 classes are needed to choose from")
    if any(place >= len(upload.classes) for place, _ in upload.labelled):
        raise RefusedError(422, f"there are labelled pictures of a class that has no name: there are {upload.classes}")
    readable = {place for place, picture in upload.labelled if picture.pixels is not None}
    for place, name in enumerate(upload.classes):
        if place not in readable:
            errors = [picture.error for other, picture in upload.labelled if other == place]
            why = f"has no picture that can be read ({errors[0]})" if errors else "has no labelled picture"
            raise RefusedError(422, f"class '{name}' {why}", labelled=upload.described_labelled())
    if not upload.pile:
        raise RefusedError(422, "there is no picture to label")
    check_one_class_each(
        (picture.mark, upload.classes[place], picture.name) for place, picture in upload.labelled if picture.mark
    )


async def drain(stream: AsyncIterator[bytes]) -> None:
    """Let the client finish sending for a while: most clients read the answer only then."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in stream:
                pass
    except (TimeoutError, ClientDisconnect):
        pass


async def at_pace(stream: AsyncIterator[bytes], grace: float, rate: float) -> AsyncIterator[bytes]:
    """Pass on a body of which at least `rate` bytes a second arrive, after `grace` seconds.

    Only the time that the server waits for the client counts.
    """
    clock = asyncio.get_running_loop().time
    waited, received = 0.0, 0
    while True:
        began = clock()
        try:
            async with asyncio.timeout(grace + received / rate - waited):
                data = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusedError(408, f"the pictures arrive at less than {rate / 1000:g} kB a second: too slow") from None
        waited += clock() - began
        received += len(data)
        yield data
