"""The `trident` command. Heavy imports stay inside the commands, so that `--help` is fast."""

from trident.cli import (  # noqa: F401 - each adds its commands
    ablation,
    data,
    leaderboard,
    measuring,
    predicting,
    reporting,
    training,
    web,
    weights,
)
from trident.cli.app import main

__all__ = ["main"]
