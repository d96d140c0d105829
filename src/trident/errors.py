"""Exceptions for mistakes of the user. Their message is one line."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Control characters, line breaks, what turns the direction of writing, and bytes of names that are not UTF-8.
_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str) -> str:
    """For a terminal: characters that would act on it are shown as escapes, so that a file's name cannot do that."""
    return _NOT_SHOWN.sub(_escaped, text)


def is_shown(text: str) -> bool:
    """Whether a terminal shows this text as it is."""
    return _NOT_SHOWN.search(text) is None


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"  # how Python keeps such a byte
    return match[0].encode("unicode_escape").decode()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the few known names that begin like this, the most similar one, or all of them."""
    known = list(known)
    longer = [one for one in known if one.startswith(name)]
    close = longer if 1 <= len(longer) <= 5 else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        return f": there are {', '.join(known)}"
    return f": did you mean {' or '.join(repr(one) for one in close)}?"


class TridentError(Exception):
    """Says what is wrong, where, and what is expected. The command line prints it and exits with code 2."""

    shared = False  # whether all processes of a run raise it; then the first alone prints it


class NotFiniteError(TridentError):
    """Training or prediction gave NaN or infinity."""


class TaskSizeError(TridentError):
    """Weights that fit tasks with one number of queries alone were given another."""


class BadValueError(TridentError, ValueError):
    """A wrong argument. Also a ValueError, which libraries that call this one expect."""


class LostProcessError(TridentError):
    """One of several processes has ended, so the others cannot go on."""


class ResumableError(TridentError):
    """Work was stopped, and what is done so far was kept."""


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a TridentError that says what cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise TridentError(f"{what}: {error.strerror or error}") from error


@contextmanager
def errors_in(where: object) -> Iterator[None]:
    """Put the place where an error was found before its message."""
    try:
        yield
    except TridentError as error:
        raise TridentError(f"{where}: {error}") from None
