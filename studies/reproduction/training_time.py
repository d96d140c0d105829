"""How long a training took, from its log."""

from pathlib import Path

from trident.learning.checkpoint import LAST
from trident.learning.run_log import read_log


def training_seconds(run: Path) -> float | None:
    """Without validation. A line of the log has the mean seconds of the steps since the line before it."""
    seconds, before = 0.0, 0
    for line in read_log(run / LAST):
        if line["kind"] == "train":
            seconds += line["seconds"] * (line["step"] - before)
            before = line["step"]
    return seconds if before else None
