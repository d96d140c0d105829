"""The request queue: one request is worked on at a time, in order of arrival, and only a few may wait."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

from trident.web.limits import RefusedError

Answer = TypeVar("Answer")
Check = Callable[[], None]  # the work calls it regularly; raises if the client is gone


class StoppedError(Exception):
    """The client is gone, so the work stops."""


class RequestQueue:
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
