"""The types of functions to which long work reports its progress."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # how much is done, and how much there is in all
StageProgress = Callable[[str, int, int], None]  # the same, after the name of the stage


def part_of(progress: StageProgress | None, name: str, place: int, parts: int) -> Progress | None:
    """The progress of one of several parts that take as long as each other."""
    return progress and (lambda done, total: progress(name, place * total + done, parts * total))


class StoppedError(Exception):
    """A progress function raises it to end the work early."""
