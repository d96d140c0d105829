"""Short training runs on noise."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiny import TINY_METHOD, TINY_RECIPE, Silent, tiny_store
from trident.data.store import ImageStore
from trident.learning.checkpoint import LAST, Checkpoint, load_checkpoint
from trident.learning.run_start import check_same_data, start_run
from trident.learning.training import Observer, train
from trident.measuring.evaluate import validate
from trident.recipes.recipe import Recipe


class Interrupting(Silent):
    """Presses Ctrl-C in a step, or sends other signals."""

    def __init__(self, interrupt_at: int, signals: tuple[int, ...] = (signal.SIGINT,)):
        self.interrupt_at = interrupt_at
        self.signals = signals

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        if step == self.interrupt_at:
            for number in self.signals:
                os.kill(os.getpid(), number)


def with_training(recipe: Recipe = TINY_RECIPE, **settings: Any) -> Recipe:
    """A recipe with other settings of training."""
    return replace(recipe, training=replace(recipe.training, **settings))


def run(
    out: Path, recipe: Recipe = TINY_RECIPE, store: ImageStore | None = None, observer: Observer | None = None
) -> Checkpoint:
    store = store or tiny_store()
    return train(start_run(recipe, store, "noise", out, "cpu"), store, out, "cpu", observer or Silent(), validate)


def resume(out: Path, store: ImageStore) -> Checkpoint:
    start = load_checkpoint(out / LAST)
    check_same_data(start, store, out)
    return train(start, store, out, "cpu", Silent(), validate)


def log_of(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


QUICK = replace(TINY_RECIPE, method=replace(TINY_METHOD, inner_steps=0))  # where the inner steps do not matter


class Whole(NamedTuple):
    """A run of TINY_RECIPE from its first step to its last."""

    folder: Path
    end: Checkpoint


def assert_same_weights(one: Checkpoint, other: Checkpoint) -> None:
    for group in ("parameters", "running", "optimizer"):
        mine, theirs = getattr(one, group), getattr(other, group)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), group
