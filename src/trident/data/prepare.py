"""Convert a published dataset into a packed store."""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import cast

import numpy as np

from trident.data.images import UnreadableImageError, decode
from trident.data.readers import Dataset
from trident.data.registry import READERS, WITH_SPLIT_FILE
from trident.data.store import ImageStore, class_table, open_store, write_store
from trident.errors import TridentError
from trident.importing import imported
from trident.progress import Progress

_IMAGE_SIZES = range(16, 1025)


def prepare(
    name: str,
    source: Path,
    target: Path,
    *,
    image_size: int | None = None,
    split_file: Path | None = None,
    progress: Progress | None = None,
) -> ImageStore:
    """Decode every image of a dataset and write a store. After an error nothing is written.

    Images of another size are resized until their shorter side fits, and cropped at the centre. Images that cannot be
    read are an error, which is reported after all images have been tried.
    """
    source, target = Path(source), Path(target)
    if image_size is not None and image_size not in _IMAGE_SIZES:
        raise TridentError(f"image size {image_size} is not between {_IMAGE_SIZES[0]} and {_IMAGE_SIZES[-1]}")
    if target.is_dir():
        raise TridentError(f"cannot write {target}: it is a folder, expected the name of a file")
    if not target.parent.is_dir():
        raise TridentError(f"cannot write {target}: the folder {target.parent} does not exist")
    dataset = read_dataset(name, source, split_file)
    table = class_table((entry.name, entry.split, len(entry.sources)) for entry in dataset.classes)
    write_store(target, dataset.name, table, _pixels(dataset, image_size or dataset.image_size, progress))
    return open_store(target)


def read_dataset(name: str, source: Path, split_file: Path | None = None) -> Dataset:
    """Describe the dataset in `source`, and check all that can be checked without decoding an image."""
    if name not in READERS:
        nearest = get_close_matches(name, READERS, 1, 0.4)
        hint = f"did you mean '{nearest[0]}'? It can be" if nearest else "it can be"
        raise TridentError(f"there is no dataset '{name}': {hint} {', '.join(READERS)}")
    if not source.exists():
        raise TridentError(f"{source} does not exist: expected the folder with {name}")
    if not source.is_dir() and name != "omniglot":
        raise TridentError(f"{source} is not a folder: expected the folder with {name}")
    if split_file is not None and name not in WITH_SPLIT_FILE:
        raise TridentError(f"{name} has a split of its own and takes no split file")
    try:
        more = (split_file,) if name in WITH_SPLIT_FILE else ()
        return cast(Dataset, imported(READERS[name])(source, *more))
    except OSError as error:
        raise TridentError(f"cannot read {error.filename or source}: {error.strerror or error}") from error


def _pixels(dataset: Dataset, size: int, progress: Progress | None) -> Iterator[np.ndarray]:
    """Decode all images. After the first that cannot be read, only count the others that cannot."""
    total = sum(len(entry.sources) for entry in dataset.classes)
    done, n_unreadable, first = 0, 0, ""
    for entry in dataset.classes:
        for source in entry.sources:
            try:
                pixels = decode(source, size, dataset.channels, dataset.inverted)
            except UnreadableImageError as error:
                n_unreadable += 1
                first = first or str(error)
            else:
                if not n_unreadable:
                    yield pixels
            done += 1
            if progress:
                progress(done, total)
    if n_unreadable:
        count = f"{n_unreadable} images cannot be read, the first is" if n_unreadable > 1 else "1 image cannot be read,"
        raise TridentError(f"{count} {first}")
