"""Parses a multipart body while it arrives. One part is in memory at a time, up to the allowed size."""

import dataclasses
import logging

from python_multipart import multipart
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from trident.web.limits import RefusedError

TEXT_BYTES = 1000  # of a part that is not a picture

# The parser logs a line for each malformed body. The visitor gets it as an answer; nothing is logged about visitors.
logging.getLogger(multipart.__name__).addHandler(logging.NullHandler())
logging.getLogger(multipart.__name__).propagate = False


@dataclasses.dataclass
class Part:
    field: str = ""
    filename: str | None = None
    content: bytearray = dataclasses.field(default_factory=bytearray)
    too_big: bool = False  # then the content is cut short


class PartReader:
    """Takes the body piece by piece and returns the complete parts."""

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
                    "on_part_begin": self._begin,
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
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RefusedError(400, f"the request cannot be read: {error}") from error
        whole, self._whole = self._whole, []
        return whole

    def close(self) -> None:
        if not self._ended:
            raise RefusedError(400, "the request is incomplete")

    def _begin(self) -> None:
        self._part = Part()

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            self._part.field = _text(options.get(b"name", b""))
            if b"filename" in options:
                self._part.filename = _text(options[b"filename"])
        self._header_name.clear()
        self._header_value.clear()

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        picture = part.field == "pile" or part.field.startswith("labelled-")  # also one without a file name
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
