"""Datasets: readers for their published formats, the packed store, and the embedded glyphs."""

READERS = {  # of the datasets that can be prepared; they are imported on use
    "mini-imagenet": "trident.data.benchmarks:read_mini_imagenet",
    "tiered-imagenet": "trident.data.benchmarks:read_tiered_imagenet",
    "cub": "trident.data.cub:read_cub",
    "omniglot": "trident.data.omniglot:read_omniglot",
    "cifar-fs": "trident.data.benchmarks:read_cifar_fs",
    "folder": "trident.data.readers:read_folder",
}
WITH_SPLIT_FILE = frozenset({"mini-imagenet", "folder"})  # their readers take a split file as the second argument
