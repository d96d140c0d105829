"""The one exception that stands for a mistake of the user's, told in one line."""


class TridentError(Exception):
    """What was wrong, where, and what would be right. The command line prints it and exits with code 2."""


class NotFiniteError(TridentError):
    """Numbers blew up: training or a prediction has no finite result."""


class BadValueError(TridentError, ValueError):
    """The same from Python, where libraries that call this one expect a ValueError."""
