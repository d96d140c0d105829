"""Features of the pictures that were sent last, in memory only, so that labelling again takes no time."""

from collections import OrderedDict

import numpy as np


class FeatureMemory:
    """Up to `limit` bytes. Features that were not used for longest are forgotten first. For one thread."""

    def __init__(self, limit: int):
        self._limit = limit
        self._known: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> np.ndarray | None:
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, key: bytes, features: np.ndarray) -> None:
        self._bytes += features.nbytes - (self._known[key].nbytes if key in self._known else 0)
        self._known[key] = features.copy()  # a part of an array would keep the whole array in memory
        self._known.move_to_end(key)
        while self._bytes > self._limit:
            self._bytes -= self._known.popitem(last=False)[1].nbytes
