"""The limits of a request, the queue of requests, and the error for refused ones."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, TypeVar

from trident.errors import TridentError

Answer = TypeVar("Answer")
Check = Callable[[], None]  # the work calls it regularly; raises if the client is gone

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


class StoppedError(Exception):
    """The client is gone, so the work stops."""


class RequestQueue:
    """One request is worked on at a time, in order of arrival, and only a few may wait."""

    def __init__(self, places: int, per_client: int):
        self._places, self._per_client = places, per_client
        self._held: Counter[str] = Counter()  # places that a client has
        self._turn = asyncio.Lock()  # first come, first served
        self._worker = ThreadPoolExecutor(1, "work")  # torch itself uses all cores

    def length(self) -> int:
        return self._held.total()

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Hold a place in the queue, from before the request's body is read."""
        if self.length() >= self._places:
            raise RefusedError(503, "too many other visitors right now: try again in a minute")
        if self._held[client] >= self._per_client:
            raise RefusedError(429, f"your address has {self._per_client} requests open: wait for their answers")
        self._held[client] += 1
        try:
            yield
        finally:
            self._held[client] -= 1
            self._held += Counter()  # forgets clients that have no place

    async def work(self, job: Callable[[Check], Answer]) -> Answer:
        """The job's result. If this is cancelled, `check` raises in the job; the next job starts when it has ended."""
        await self._turn.acquire()
        stopped = Event()

        def check() -> None:
            if stopped.is_set():
                raise StoppedError

        def ended(working: "asyncio.Future[Answer]") -> None:
            self._turn.release()
            working.exception()  # marks the exception as handled

        working = asyncio.get_running_loop().run_in_executor(self._worker, job, check)
        working.add_done_callback(ended)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            stopped.set()  # not waited for: the visitor of a server that is being stopped wants an answer
            raise
