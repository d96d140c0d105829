"""How much one visitor may ask for, and how a request is turned down."""

from dataclasses import dataclass
from typing import Any

from trident.errors import TridentError

MEGA = 1_000_000


class RefusedError(TridentError):
    """A whole request that is turned down: the HTTP status, a line for the visitor, and what else the page may use."""

    def __init__(self, status: int, message: str, **details: Any):
        super().__init__(message)
        self.status = status
        self.details = details


@dataclass(frozen=True)
class Limits:
    """Of one request, but for `at_once`. A picture is decoded as it arrives, so a long request needs no more memory."""

    classes: int = 50
    labelled: int = 100  # they are looked at with every chunk of the pile, so they are what takes memory
    pictures: int = 300  # labelled ones and the pile together
    file_bytes: int = 20 * MEGA
    request_bytes: int = 500 * MEGA
    pixels: int = 50 * MEGA  # of one picture, as its header says; Pillow itself stops at 89 million
    upload_seconds: float = 120
    seconds: float = 120  # waiting for one's turn, and the work
    at_once: int = 16  # requests that are being sent, wait or are worked on

    def check_pictures(self, labelled: int, pile: int) -> None:
        if labelled > self.labelled:
            raise RefusedError(413, f"more than {self.labelled} labelled pictures: send fewer of each class")
        if labelled + pile > self.pictures:
            raise RefusedError(413, f"more than {self.pictures} pictures in one request: send the pile in parts")

    def check_size(self, n_bytes: int) -> None:
        if n_bytes > self.request_bytes:
            most = megabytes(self.request_bytes)
            raise RefusedError(413, f"more than {most} in one request: send fewer pictures, or smaller ones")


def megabytes(n_bytes: int) -> str:
    return f"{n_bytes / MEGA:g} MB"
