"""`trident predict` that is killed or interrupted goes on where it stopped."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stand_in_backbone import PATH, PAUSE, SEEN, SLOW, save_pictures, save_support_and_pile
from trident.backbones.pretrained import BATCH, find_backbone
from trident.labelling.feature_cache import FeatureCache


@pytest.fixture
def slow_pile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes with two labelled pictures each, and a large pile. The cache is empty."""
    save_support_and_pile(tmp_path)
    save_pictures(tmp_path / "pile", {"red": 130, "green": 90, "blue": 60})
    monkeypatch.setenv("TRIDENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, seen: str, pause: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trident", "predict", "--backbone", SLOW, "--support", "support"]
    command += ["--query", "pile", "--out", "labels.csv"]
    environment = os.environ | PATH | {SEEN: str(folder / seen), PAUSE: str(pause)}
    # A shell starts jobs in the background with Ctrl-C turned off, and tests may be such a job.
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def lines_in(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_for(process: "subprocess.Popen[str]", path: Path, n_pictures: int) -> None:
    for _ in range(1200):
        if len(lines_in(path)) >= n_pictures:
            return
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("it did not start")


@pytest.mark.slow
def test_killed_and_started_again(slow_pile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed twice except the batch that was being computed, and nothing is lost."""
    process = start(slow_pile, "first", 0.15)
    wait_for(process, slow_pile / "first", 9 * BATCH)  # some are of loading the network
    process.kill()
    process.wait(60)
    if process.stderr:
        process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    assert not (slow_pile / "labels.csv").exists()
    process = start(slow_pile, "second", 0)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    monkeypatch.setenv(SEEN, str(slow_pile / "loading"))
    find_backbone(SLOW)  # a network is tried when it is loaded
    blank = hash_of_nothing()
    always = {*lines_in(slow_pile / "loading"), blank}
    first, second = ([one for one in lines_in(slow_pile / name) if one not in always] for name in ("first", "second"))
    assert len(set(first)) >= 5 * BATCH
    assert len(set(first) & set(second)) <= BATCH
    assert len(first) + len(second) <= 286 + BATCH  # 280 in the pile and 6 labelled ones
    assert len({*first, *second}) == 286
    rows = list(csv.DictReader(io.StringIO((slow_pile / "labels.csv").read_text())))
    assert len(rows) == 280
    assert all(Path(row["path"]).name.split("-")[0] == row["label"] for row in rows)
    assert [path.name for path in slow_pile.glob(".*")] == []


def hash_of_nothing() -> str:
    """What `slow` writes for a blank picture, which fills up a batch."""
    import hashlib

    import torch

    from trident.backbones.pretrained import IMAGENET_MEAN, IMAGENET_STD

    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = torch.zeros(1, 16, 16, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    return hashlib.sha256(((pixels.to(mean.dtype) - mean) / std)[0].contiguous().numpy().tobytes()).hexdigest()


def test_ctrl_c_says_how_to_go_on(slow_pile: Path) -> None:
    process = start(slow_pile, "first", 0.15)
    wait_for(process, slow_pile / "first", 6 * BATCH)  # trying the network, labelled pictures, and four of the pile's
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert said.strip().splitlines()[-1] == "trident: stopped; the same command goes on where it stopped"
    assert "Traceback" not in said
    assert not (slow_pile / "labels.csv").exists()
    assert FeatureCache(slow_pile / "cache").size()[0] > 2 * BATCH
