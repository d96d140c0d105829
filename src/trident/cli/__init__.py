"""The `trident` command. Heavy imports stay inside the commands, so that `--help` is fast."""

from trident.cli import (  # noqa: F401 - each adds its commands
    ablation,
    backbones,
    data,
    fitting,
    leaderboard,
    measuring,
    methods,
    predicting,
    reporting,
    sorting,
    training,
    web,
    weights,
)
from trident.cli.app import main

__all__ = ["main"]
