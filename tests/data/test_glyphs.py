"""The embedded glyphs: what they are, to the last pixel."""

from trident.data.glyphs import open_glyphs

FINGERPRINT = "556acb73cf015753cc2cef8ff696010ce0acc691cc1729df43a4a307797f999b"


def test_what_the_glyphs_hold() -> None:
    store = open_glyphs()
    assert store.images.shape == (26_660, 28, 28, 1)
    assert {split: len(store.classes_of(split)) for split in ("train", "val", "test")} == {
        "train": 1021,
        "val": 79,
        "test": 233,
    }
    assert all(entry.count == 20 for entry in store.classes)
    assert store.fingerprint == FINGERPRINT


def test_splits_are_by_script() -> None:
    scripts: dict[str, set[str]] = {}
    for entry in open_glyphs().classes:
        scripts.setdefault(entry.split, set()).add(entry.name.split()[0])
    assert scripts == {
        "train": {"LATIN", "CYRILLIC", "CANADIAN", "ARABIC"},
        "val": {"GREEK", "COPTIC", "OLD", "LISU"},
        "test": {"ARMENIAN", "GEORGIAN", "HEBREW", "LAO"},
    }


def test_drawings_are_neither_empty_nor_equal() -> None:
    images = open_glyphs().images
    ink = (images > 0).mean((1, 2, 3))
    assert ink.min() > 0.01
    assert ink.max() < 0.6
    assert len({image.tobytes() for image in images}) > 0.999 * len(images)
