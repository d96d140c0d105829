"""The request queue: one request is worked on at a time, in order of arrival, and only a few may wait."""

import asyncio
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
    def __init__(self, places: int):
        self._places = places
        self._turn = asyncio.Lock()  # first come, first served
        self._worker = ThreadPoolExecutor(1, "work")  # torch itself uses all cores

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place in the queue, from before the request's body is read."""
        if self._places == 0:
            raise RefusedError(503, "too many other visitors right now: try again in a minute")
        self._places -= 1
        try:
            yield
        finally:
            self._places += 1

    async def work(self, job: Callable[[Check], Answer]) -> Answer:
        """The job's result. If this is cancelled, `check` raises in the job; the next job starts when it has ended."""
        async with self._turn:
            stopped = Event()

            def check() -> None:
                if stopped.is_set():
                    raise StoppedError

            working = asyncio.get_running_loop().run_in_executor(self._worker, job, check)
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                stopped.set()
                await asyncio.wait({working})
                working.exception()  # marks the exception as handled
                raise
