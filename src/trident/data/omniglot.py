"""Omniglot (Lake et al. 2015) from its zip files, without extracting them, or from extracted folders.

A class is one character of one alphabet. The split is by alphabet. The evaluation set is for testing. Of the background
alphabets, sorted by name, the last sixth (at least one) is for validation, the rest for training. Without the
evaluation set, the last sixth is for testing and the sixth before it for validation.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from struct import error as StructError
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from trident.data.images import DatasetImage
from trident.data.readers import ClassImages, Dataset, image_files, ordered_classes, subfolders
from trident.errors import TridentError

# The small sets are subsets of the first: take the first one that exists.
_BACKGROUNDS = ("images_background", "images_background_small1", "images_background_small2")
_EVALUATION = "images_evaluation"
_MAX_BYTES = 1 << 20  # a drawing has about 300 bytes

Alphabets = dict[str, dict[str, list[DatasetImage]]]  # alphabet, character, drawings


@dataclass(frozen=True, slots=True)
class ZippedImage(DatasetImage):
    """An image in a zip file. The zip file stays open as long as one of its images is referenced."""

    archive: ZipFile
    member: str

    @property
    def name(self) -> str:
        return f"{self.archive.filename}: {self.member}"

    @property
    def file(self) -> Path:
        return Path(str(self.archive.filename))

    def content(self) -> bytes:
        """Read no more than a drawing may have: the size that the archive states can be wrong."""
        with self.archive.open(self.member) as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes, too many for a drawing")
        return content


def read_omniglot(source: Path) -> Dataset:
    """Describe Omniglot from a folder with its zip files or extracted folders, or from a single one of them."""
    background, evaluation = _find(source)
    alphabets = sorted(background)
    held_out = max(1, len(alphabets) // 6)
    n_parts = 2 if evaluation else 3
    if len(alphabets) < n_parts:
        present = f"{source} has {len(alphabets)} background alphabets"
        raise TridentError(f"{present}: at least {n_parts} are needed to split")
    split_of = dict.fromkeys(alphabets, "train")
    if not evaluation:
        split_of |= dict.fromkeys(alphabets[-held_out:], "test")
        alphabets = alphabets[:-held_out]
    split_of |= dict.fromkeys(alphabets[-held_out:], "val")
    classes = [
        ClassImages(f"{alphabet}/{character}", split_of[alphabet] if part is background else "test", drawings)
        for part in (background, evaluation)
        for alphabet, characters in part.items()
        for character, drawings in characters.items()
    ]
    return Dataset("omniglot", ordered_classes(source, classes), image_size=28, channels=1, inverted=True)


def _find(source: Path) -> tuple[Alphabets, Alphabets]:
    """The background and the evaluation alphabets. Either may be empty."""
    if source.is_file():
        set_name, alphabets = _read_zip(source)
        return ({}, alphabets) if set_name == _EVALUATION else (alphabets, {})
    if source.resolve().name in _BACKGROUNDS and not any((source / name).exists() for name in _BACKGROUNDS):
        return _read_folder(source), {}
    background = next((alphabets for name in _BACKGROUNDS if (alphabets := _read_set(source, name))), None)
    if background is None:
        missing = "no images_background.zip, nor a folder images_background"
        raise TridentError(f"{source} has {missing}: expected Omniglot's files")
    return background, _read_set(source, _EVALUATION)


def _read_set(source: Path, name: str) -> Alphabets:
    archive = source / f"{name}.zip"
    if archive.is_file():
        return _read_zip(archive)[1]
    return _read_folder(source / name) if (source / name).is_dir() else {}


def _read_folder(folder: Path) -> Alphabets:
    png = frozenset({".png"})
    return {
        alphabet.name: {character.name: [*image_files([character], png)] for character in subfolders(alphabet)}
        for alphabet in subfolders(folder)
    }


def _read_zip(path: Path) -> tuple[str, Alphabets]:
    """The name of the set in a zip file, and its alphabets. Members are checked by name and size, not read."""
    try:
        archive = ZipFile(path)
    except (BadZipFile, OSError, NotImplementedError, ValueError, OverflowError, StructError) as error:
        raise TridentError(f"{path} is not a whole zip file: {error}") from error
    set_names, alphabets = set(), Alphabets()
    seen: set[str] = set()
    for member in sorted(archive.infolist(), key=lambda member: member.filename):
        parts = PurePosixPath(member.filename).parts
        if member.is_dir() or not parts or parts[0] == "__MACOSX" or parts[-1].startswith("."):
            continue
        if len(parts) != 4 or ".." in parts or parts[0] == "/" or not parts[3].lower().endswith(".png"):
            form = "SET/ALPHABET/CHARACTER/IMAGE.png"
            raise TridentError(f"{path}: member {member.filename!r} is not of the form {form}")
        if member.file_size > _MAX_BYTES:
            raise TridentError(f"{path}: member {member.filename} has {member.file_size} bytes, too many for a drawing")
        if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # the others can be unpacked as a whole only
            raise TridentError(f"{path}: member {member.filename} is not compressed with deflate, as zip files are")
        if member.filename in seen:
            raise TridentError(f"{path}: member {member.filename} is there twice")
        seen.add(member.filename)
        set_names.add(parts[0])
        alphabets.setdefault(parts[1], {}).setdefault(parts[2], []).append(ZippedImage(archive, member.filename))
    if len(set_names) != 1:
        raise TridentError(f"{path} holds {len(set_names)} sets of images, expected one of Omniglot's")
    return set_names.pop(), alphabets
