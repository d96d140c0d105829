"""Facts about methods. Nothing here imports torch, so that listing the methods is fast."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class About:
    """Facts about a method. `trident methods` prints them; training and measuring use them.

    They are literals, because the list of methods reads them from the source, and hold for the default settings.
    """

    title: str
    citation: str  # authors and year
    paper: str
    trained_on: Literal["episodes", "classes", "nothing"] = "episodes"  # classes: batches of all training classes
    transductive: bool = False  # whether queries are classified together, apart from batch norm
    analyses: tuple[str, ...] = ()  # further analyses that it supports: "latents", "reconstructions"
    any_way: bool = True  # whether trained weights can classify tasks with any number of classes
    positional: bool = False  # whether weights are tied to positions in the task, so that the order of images matters
