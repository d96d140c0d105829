"""Convert a published dataset into a packed store."""

import hashlib
from collections.abc import Generator
from difflib import get_close_matches
from pathlib import Path
from typing import cast

import numpy as np
import PIL

import trident
from trident.data import READERS, WITH_SPLIT_FILE
from trident.data.decoding_process import decoded
from trident.data.images import Target, UnreadableImageError
from trident.data.readers import Dataset, refuse_links_outside
from trident.data.resuming import check_new_store, write_resumable_store
from trident.data.store import ImageStore, StoreWriter, open_store
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
    workers: int = 1,
    on_resume: Progress | None = None,
) -> ImageStore:
    """Decode every image of a dataset and write a store. After an error nothing is written.

    Images that cannot be read are an error, which is reported after all images have been tried. `workers` is the number
    of processes that decode them. A run that was killed or interrupted is resumed by the next one with the same
    arguments, which calls `on_resume`.
    """
    source, target = Path(source), Path(target)
    if image_size is not None and image_size not in _IMAGE_SIZES:
        raise TridentError(f"image size {image_size} is not between {_IMAGE_SIZES[0]} and {_IMAGE_SIZES[-1]}")
    check_new_store(target)
    dataset = read_dataset(name, source, split_file)
    size = image_size or dataset.image_size
    decoding = Target(size, dataset.channels, dataset.inverted)
    write_resumable_store(
        target,
        lambda file: StoreWriter(file, dataset.name, dataset.table, (size, size, dataset.channels)),
        fingerprint_of_inputs(dataset, decoding),
        lambda first: _pixels(dataset, first, decoding, workers, progress),
        on_resume,
    )
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
        dataset = cast(Dataset, imported(READERS[name])(source, *more))
        if source.is_dir():
            refuse_links_outside(source, dict.fromkeys(image.file for image in dataset.sources))
        return dataset
    except OSError as error:
        raise TridentError(f"cannot read {error.filename or source}: {error.strerror or error}") from error


def fingerprint_of_inputs(dataset: Dataset, *options: object) -> str:
    """Changes when the store could become another: with the files, their order and splits, options and versions."""
    digest = hashlib.sha256(repr((dataset.name, options, trident.__version__, PIL.__version__)).encode())
    file, state = None, (0, 0)
    for entry in dataset.classes:
        digest.update(repr((entry.name, entry.split, len(entry.sources))).encode())
        for source in entry.sources:
            if source.file != file:  # a pickle or zip file holds many images
                file, state = source.file, _size_and_time(source.file)
            digest.update(repr((source.name, state)).encode())
    return digest.hexdigest()


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        return file.stat().st_size, file.stat().st_mtime_ns
    except OSError:  # reported when it is decoded
        return -1, -1


def _pixels(
    dataset: Dataset, first: int, target: Target, workers: int, progress: Progress | None
) -> Generator[np.ndarray, None, None]:
    """Decode all images but the first ones. After one that cannot be read, only count the others that cannot."""
    sources = dataset.sources
    n_unreadable, first_unreadable = 0, ""
    for done, result in enumerate(decoded(sources[first:], target, workers), first + 1):
        if isinstance(result, UnreadableImageError):
            n_unreadable += 1
            first_unreadable = first_unreadable or str(result)
        elif not n_unreadable:
            yield result
        if progress:
            progress(done, len(sources))
    if n_unreadable:
        count = f"{n_unreadable} images cannot be read, the first is" if n_unreadable > 1 else "1 image cannot be read,"
        raise TridentError(f"{count} {first_unreadable}")
