"""The embedded glyphs: letters of a dozen scripts, like Omniglot, with no download.

Classes are letters, 20 drawings of 28 x 28 pixels each. Splits are by script: train on Latin, Cyrillic, Canadian
syllabics and Arabic; validate on Greek, Coptic, Old Italic and Lisu; test on Armenian, Georgian, Hebrew and Lao.
`tools/render_glyphs.py` made them.
"""

from functools import cache
from pathlib import Path

import numpy as np

from trident.data.store import ImageStore, class_table, store_in_memory

SIZE = 28


@cache
def open_glyphs() -> ImageStore:
    with np.load(Path(__file__).with_name("glyphs.npz")) as file:
        bits, names, splits = file["bits"], file["names"].tolist(), file["splits"].tolist()
    images = np.unpackbits(bits, axis=1).reshape(-1, SIZE, SIZE, 1) * np.uint8(255)
    per_class = len(images) // len(names)
    classes = class_table((name, split, per_class) for name, split in zip(names, splits, strict=True))
    return store_in_memory("glyphs", images, classes)
