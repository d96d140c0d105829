"""Where requests wait their turn: one is worked on at a time, in the order of their arrival, and few may wait."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

from trident.web.limits import RefusedError

Answer = TypeVar("Answer")
Check = Callable[[], None]  # called now and then by work; raises if nobody waits for it any more


class StoppedError(Exception):
    """Work that nobody waits for any more."""


class RequestQueue:
    def __init__(self, places: int):
        self._places = places
        self._turn = asyncio.Lock()  # hands itself on in the order of arrival
        self._worker = ThreadPoolExecutor(1, "work")  # torch spreads it over the cores

    @contextmanager
    def place(self) -> Iterator[None]:
        """For as long as a request is here, from before its body is read."""
        if self._places == 0:
            raise RefusedError(503, "too many others are being served just now: try again in a minute")
        self._places -= 1
        try:
            yield
        finally:
            self._places += 1

    async def work(self, job: Callable[[Check], Answer]) -> Answer:
        """The job's result. If this is cancelled the job is told so, and the next has its turn once it has ended."""
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
                working.exception()  # taken note of
                raise
