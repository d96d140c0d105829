"""Decodes visitors' pictures, so that those that take long do not keep others waiting."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trident.data.decoding_process import DecodingProcesses, TooSlowError
from trident.data.images import ImageSource, Target

_QUICK_SECONDS = 0.5  # of processor time; a photograph of 12 megapixels takes less
_SECONDS = 4.0  # for the others
_QUICK, _PATIENT = 2, 1  # pictures at a time


class PageDecoder:
    """Every picture is tried for a short time. One that takes longer begins anew and waits for others like it.

    So pictures that are made to take long hold up each other, and an ordinary one only for a moment.
    """

    def __init__(self, processes: DecodingProcesses):
        self._processes = processes
        self._quick = ThreadPoolExecutor(_QUICK, "decode")
        self._patient = ThreadPoolExecutor(_PATIENT, "decode-long")
        processes.start(1)  # while the network is loaded

    async def decode(self, source: ImageSource, target: Target) -> np.ndarray:
        """Raises UnreadableImageError."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self._quick, self._processes.decode, source, target, _QUICK_SECONDS)
        except TooSlowError:
            return await run(self._patient, self._processes.decode, source, target, _SECONDS)
