"""The `trident` command. Heavy imports stay inside the commands, so that `--help` is fast."""

from trident.cli import (
    ablation,
    backbones,
    bench,
    data,
    fitting,
    leaderboard,
    looking,
    measuring,
    methods,
    paper,
    predicting,
    reporting,
    reproduction,
    training,
    web,
    weights,
)
from trident.cli.app import main

__all__ = [
    "ablation",
    "backbones",
    "bench",
    "data",
    "fitting",
    "leaderboard",
    "looking",
    "main",
    "measuring",
    "methods",
    "paper",
    "predicting",
    "reporting",
    "reproduction",
    "training",
    "web",
    "weights",
]
