"""The limits of a request, and the error for refused requests."""

from dataclasses import dataclass, replace
from typing import Any

from trident.errors import TridentError

MEGA = 1_000_000


class RefusedError(TridentError):
    """A refused request: the HTTP status, a message for the visitor, and details for the page."""

    def __init__(self, status: int, message: str, **details: Any):
        super().__init__(message)
        self.status = status
        self.details = details


@dataclass(frozen=True)
class Limits:
    """The limits of one request; the last three are for all requests. Pictures are decoded and shrunk on arrival."""

    classes: int = 50
    labelled: int = 100  # with weights of Conv4 they are in memory with every chunk of the pile
    pictures: int = 300  # labelled ones and the pile together
    file_bytes: int = 20 * MEGA
    request_bytes: int = 500 * MEGA
    pixels: int = 50 * MEGA  # of one picture, as its header says; Pillow itself stops at 89 million
    upload_seconds: float = 120
    grace_seconds: float = 10  # the first seconds of sending may be slower than this:
    bytes_per_second: int = 10_000  # a client that sends more slowly would only hold a place
    seconds: float = 120  # waiting and working
    at_once: int = 16  # requests that are received, waiting or worked on
    per_client: int = 16  # of these, requests of one client
    held_bytes: int = 1000 * MEGA  # decoded pictures of all of them

    def for_pictures_of(self, n_bytes: int) -> "Limits":
        """With fewer requests at once if pictures of this size would take more memory than allowed."""
        fitting = self.held_bytes // (self.pictures * n_bytes)
        return replace(self, at_once=max(1, min(self.at_once, fitting)))

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
