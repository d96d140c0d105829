"""The `trident` command. Heavy imports stay inside the commands, so that `--help` is fast."""

from trident.cli import (
    ablation,
    analysing,
    backbones,
    data,
    fitting,
    leaderboard,
    measuring,
    methods,
    predicting,
    reporting,
    training,
    web,
    weights,
)
from trident.cli.app import main

__all__ = [
    "ablation",
    "analysing",
    "backbones",
    "data",
    "fitting",
    "leaderboard",
    "main",
    "measuring",
    "methods",
    "predicting",
    "reporting",
    "training",
    "web",
    "weights",
]
