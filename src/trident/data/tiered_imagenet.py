"""tieredImageNet (Ren et al. 2018): for each split a pickle of PNG files and a pickle of labels."""

from pathlib import Path
from typing import Any

import numpy as np

from trident.data.pickles import Images, PickleCache, as_text, image_numbers, load_fields
from trident.data.readers import ClassImages, Dataset, ordered_classes, require_files
from trident.data.store import SPLITS
from trident.data.unpickle import load_pickle
from trident.errors import TridentError


def read_tiered_imagenet(source: Path) -> Dataset:
    """Describe tieredImageNet from its label pickles alone.

    The image pickles, gigabytes each, are loaded one at a time, when their images are decoded. Only then is the number
    of images compared with the number of labels.
    """
    label_files = require_files(source, (f"{split}_labels.pkl" for split in SPLITS))
    image_files = require_files(source, (f"{split}_images_png.pkl" for split in SPLITS))
    n_images: dict[Path, int] = {}
    cache = PickleCache(lambda path: _load_images(path, n_images[path]))
    classes: list[ClassImages] = []
    for split, label_file, image_file in zip(SPLITS, label_files, image_files, strict=True):
        fields = load_fields(label_file, "label_specific")
        labels = fields["label_specific"]
        n_images[image_file] = len(labels) if isinstance(labels, np.ndarray | list | tuple) else 0
        grouped = image_numbers(label_file, labels, n_images[image_file])
        for label, name in _class_names(label_file, split, fields, grouped).items():
            classes.append(ClassImages(name, split, cache.sources(image_file, grouped.get(label, []))))
    return Dataset("tiered-imagenet", ordered_classes(source, classes), image_size=84)


def _class_names(path: Path, split: str, fields: dict[str, Any], grouped: dict[int, list[int]]) -> dict[int, str]:
    """The name of each label: its string if the pickle has one, else the split and the number."""
    strings = fields.get("label_specific_str")
    if strings is None:
        return {label: f"{split}-{label:03d}" for label in grouped}
    if not isinstance(strings, list | tuple | np.ndarray):
        raise TridentError(f"{path}: its label_specific_str is a {type(strings).__name__}, not a list of class names")
    names = [as_text(path, string) for string in strings]
    wrong = [label for label in grouped if not 0 <= label < len(names)]
    if wrong:
        raise TridentError(f"{path}: label_specific has {wrong[0]}, but label_specific_str names {len(names)} classes")
    return dict(enumerate(names))


def _load_images(path: Path, n_labels: int) -> Images:
    images = load_pickle(path)
    if not isinstance(images, list | tuple | np.ndarray):
        raise TridentError(f"{path} holds a {type(images).__name__}, not a list of PNG files")
    if len(images) != n_labels:
        raise TridentError(f"{path} has {len(images)} images for {n_labels} labels")
    return images
