"""The types of functions to which long work reports its progress."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # how much is done, and how much there is in all
StageProgress = Callable[[str, int, int], None]  # the same, after the name of the stage


class StoppedError(Exception):
    """A progress function raises it to end the work early."""
