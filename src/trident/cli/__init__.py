"""The `trident` command. Heavy imports stay inside the commands, so that help is there at once."""

from trident.cli import data, measuring, training
from trident.cli.app import main

__all__ = ["data", "main", "measuring", "training"]
