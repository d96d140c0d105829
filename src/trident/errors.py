"""Exceptions for mistakes of the user. Their message is one line."""


class TridentError(Exception):
    """Says what is wrong, where, and what is expected. The command line prints it and exits with code 2."""


class NotFiniteError(TridentError):
    """Training or prediction gave NaN or infinity."""


class BadValueError(TridentError, ValueError):
    """A wrong argument. Also a ValueError, which libraries that call this one expect."""


class ResumableError(TridentError):
    """Work was stopped, and what is done so far was kept."""
