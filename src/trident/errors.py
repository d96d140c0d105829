"""Exceptions for mistakes of the user. Their message is one line."""


class TridentError(Exception):
    """Says what is wrong, where, and what is expected. The command line prints it and exits with code 2."""

    shared = False  # whether all processes of a run raise it; then the first alone prints it


class NotFiniteError(TridentError):
    """Training or prediction gave NaN or infinity."""


class BadValueError(TridentError, ValueError):
    """A wrong argument. Also a ValueError, which libraries that call this one expect."""


class LostProcessError(TridentError):
    """One of several processes has ended, so the others cannot go on."""


class ResumableError(TridentError):
    """Work was stopped, and what is done so far was kept."""
