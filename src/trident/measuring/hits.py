"""The number of correct predictions in each task, encoded as text, so that two results can be paired by task."""

import base64

import numpy as np

from trident.measuring.evaluate import Predictions


def hits_of(predictions: Predictions) -> np.ndarray:
    """(task,)"""
    return np.asarray((predictions.log_probabilities.argmax(2) == predictions.labels).sum(1))


def packed(counts: np.ndarray) -> str:
    """Numbers from 0 as text, two bytes each; four, after a colon, if one is above 65,535."""
    mark, kind = (":", "<u4") if counts.max(initial=0) > 65_535 else ("", "<u2")
    return mark + base64.b64encode(counts.astype(kind).tobytes()).decode()


def unpacked(text: str) -> np.ndarray:
    kind = "<u4" if text.startswith(":") else "<u2"
    return np.frombuffer(base64.b64decode(text.removeprefix(":")), kind).astype(np.int64)
