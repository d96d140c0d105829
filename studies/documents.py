"""Documents whose first part is written by hand, and whose rest is generated from saved results."""

from pathlib import Path

from trident.errors import TridentError
from trident.files import read_regular


def introduction_before(first: str, path: Path, title: str, heading: str) -> str:
    """The part written by hand: what stands before `first`. A document that is not there yet gets a title.

    A file without this `heading` is some other document, and must not be overwritten.
    """
    if not path.is_file():
        return f"# {title}\n"
    try:
        text = read_regular(path).decode()
    except UnicodeDecodeError:
        text = ""
    if f"\n{heading}\n" not in text:
        raise TridentError(f"{path} is another document: it has no heading '{heading}', so it is left as it is")
    return text.partition(f"\n{first}")[0]
