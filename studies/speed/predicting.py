"""Benchmark of the command `trident predict`, from start to finished table."""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from studies.speed.timing import gib_of
from trident.engines.execution import device_name
from trident.errors import TridentError
from trident.labelling.making import CONV4, chosen_backbone
from trident.progress import Progress

_BLOCKS = 7  # along each side of a picture


@dataclass(frozen=True)
class PredictBenchmark:
    n_way: int
    n_shot: int
    pictures: int  # unlabelled
    size: int
    backbone: str
    weights: str
    device: str
    rounds: tuple[float, ...]  # seconds each, of the first run on a pile
    again: tuple[float, ...]  # of a second run on the same pile, with cached features; empty without a cache
    peak: float  # GiB, the largest of any round

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": "predict",
            "n_way": self.n_way,
            "n_shot": self.n_shot,
            "pictures": self.pictures,
            "image_size": self.size,
            "backbone": self.backbone,
            "weights": self.weights,
            "device": device_name(self.device),
            "torch": str(torch.__version__),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "repeats": len(self.rounds),
            "seconds": statistics.median(self.rounds),
            "seconds_of_each_round": self.rounds,
            "seconds_with_cached_features": statistics.median(self.again) if self.again else None,
            "peak_memory_gib": self.peak,
            "peak_memory_of": "the command's whole process",
        }


def bench_predict(
    n_way: int,
    n_shot: int,
    pictures: int,
    size: int,
    backbone: str,
    weights: str,
    device: str,
    repeats: int,
    progress: Progress,
) -> PredictBenchmark:
    """Time the command on made-up JPEG files, each time in a new process, and again with its features in a cache."""
    backbone = chosen_backbone(backbone, weights)
    if Path(weights).exists():
        weights = str(Path(weights).resolve())  # the command runs in another folder
    with TemporaryDirectory() as name:
        folder = Path(name)
        generator = np.random.default_rng(0)
        for way in range(n_way):
            _fill(folder / "labelled" / f"class {way}", n_shot, size, generator)
        _fill(folder / "pile", pictures, size, generator)
        call = ["predict", "--support", "labelled", "--query", "pile", "--out", "labels.csv", "--backbone", backbone]
        call += ["--weights", weights] if backbone == CONV4 else []
        command = [sys.executable, "-m", "trident", *call, "--device", device]
        rounds: list[float] = []
        again: list[float] = []
        peaks: list[float] = []
        for done in range(1, repeats + 1):
            for times in (rounds, again):
                if times is again and backbone == CONV4:
                    continue
                seconds, peak = _run(command, folder, folder / f"cache {done}")
                times.append(seconds)
                peaks.append(peak)
            progress(done, repeats)
        rows = (folder / "labels.csv").read_text("utf-8").count("\n") - 1
    if rows != pictures:
        raise TridentError(f"the table has {rows} rows for {pictures} pictures: the benchmark measured something else")
    return PredictBenchmark(
        n_way, n_shot, pictures, size, backbone, weights, device, tuple(rounds), tuple(again), max(peaks)
    )


def _fill(folder: Path, n: int, size: int, generator: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for place in range(n):
        blocks = generator.integers(0, 256, (_BLOCKS, _BLOCKS, 3), np.uint8)
        Image.fromarray(blocks).resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{place:06}.jpg")


def _run(command: list[str], folder: Path, cache: Path) -> tuple[float, float]:
    """Seconds from start to end, and peak memory in GiB."""
    with (folder / "output.txt").open("w+b") as output:
        start = time.perf_counter()
        environment = os.environ | {"TRIDENT_CACHE": str(cache)}
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)  # unlike `wait`, returns the memory use of this process
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            last = output.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise TridentError(f"'trident predict' failed: {' '.join(last).removeprefix('trident: error: ')}")
    return seconds, gib_of(usage)
