"""How long a training took, from its log."""

import json
from pathlib import Path


def training_seconds(run: Path) -> float | None:
    """Without validation. A line of the log has the mean seconds of the steps since the line before it."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    seconds, before = 0.0, 0
    for line in lines:
        if line["kind"] == "train":
            seconds += line["seconds"] * (line["step"] - before)
            before = line["step"]
    return seconds if before else None
