"""Describe a store and verify its fingerprint."""

from typing import Any

from trident.data.store import SPLITS, ImageStore, store_in_memory


def describe(store: ImageStore) -> dict[str, Any]:
    """The values that `trident data show` prints."""
    splits = {}
    for split in SPLITS:
        counts = [entry.count for entry in store.classes if entry.split == split]
        if counts:
            splits[split] = {
                "classes": len(counts),
                "images": sum(counts),
                "fewest_images_in_a_class": min(counts),
                "most_images_in_a_class": max(counts),
            }
    kind = (
        {key: getattr(store, key) for key in ("features_of", "features_fingerprint")}
        | {"features": store.images.shape[1]}
        if store.features_of
        else {"image_size": store.image_size, "channels": store.image_channels}
    )
    return {
        "dataset": store.dataset,
        **kind,
        "images": len(store.images),
        "splits": splits,
        "fingerprint": store.fingerprint,
        "checksums": 0 if store.checksums is None else len(store.checksums.digests),
    }


def verify_fingerprint(store: ImageStore) -> bool:
    """Read every pixel and check that the fingerprint matches the class table and the images."""
    return store_in_memory(store.dataset, store.images, store.classes).fingerprint == store.fingerprint
