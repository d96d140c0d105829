"""The names of the datasets that can be prepared. Nothing is imported here, so that help is there at once."""

from typing import Literal, get_args

DatasetName = Literal["mini-imagenet", "tiered-imagenet", "cub", "omniglot", "cifar-fs", "folder"]
DATASET_NAMES: tuple[str, ...] = get_args(DatasetName)
