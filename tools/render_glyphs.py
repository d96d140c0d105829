"""Render the embedded glyphs: `python tools/render_glyphs.py` rewrites src/trident/data/glyphs.npz.

Letters of 12 scripts, each drawn 20 times in random faces of DejaVu (which matplotlib ships) with small warps, 28 x 28
pixels, one bit each. Only needed to change the set: the file is part of the package.
"""

import argparse
import math
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

TARGET = Path(__file__).parent.parent / "src" / "trident" / "data" / "glyphs.npz"
# Scripts as the first word of their letters' Unicode names. A shape that two scripts share stays with the first one
# named here, so that no letter of a test script was seen, under another name, in training.
SPLIT_OF_SCRIPT = {
    "LATIN": "train",
    "CYRILLIC": "train",
    "CANADIAN": "train",
    "ARABIC": "train",
    "GREEK": "val",
    "COPTIC": "val",
    "OLD": "val",  # Old Italic
    "LISU": "val",
    "ARMENIAN": "test",
    "GEORGIAN": "test",
    "HEBREW": "test",
    "LAO": "test",
}
IMAGES_PER_CLASS = 20
SIZE = 28
CANVAS = 4 * SIZE  # drawn large, then shrunk
FEWEST_FACES = 4
# Overlap of two normalised shapes above which they count as one; stricter where a letter of another split is alike.
SAME_SHAPE_IN_SPLIT = 0.88
SAME_SHAPE_ACROSS = 0.75
SEED = 0


def letters_by_script(faces: dict[Path, set[int]]) -> dict[str, list[str]]:
    """Letters that are no variant of another one and exist in enough faces."""
    found: dict[str, list[str]] = {script: [] for script in SPLIT_OF_SCRIPT}
    for code in sorted(set().union(*faces.values())):
        letter = chr(code)
        script = unicodedata.name(letter, "?").split()[0]
        in_faces = sum(code in covered for covered in faces.values())
        is_letter = unicodedata.category(letter) in ("Lu", "Ll", "Lo") and not unicodedata.decomposition(letter)
        if script in found and is_letter and in_faces >= FEWEST_FACES:
            found[script].append(letter)
    return found


def draw(letter: str, face: Path) -> Image.Image:
    """The letter alone, trimmed, its longer side 80 pixels."""
    font = ImageFont.truetype(str(face), 96, layout_engine=ImageFont.Layout.BASIC)
    canvas = Image.new("L", (320, 320))
    ImageDraw.Draw(canvas).text((96, 64), letter, 255, font)
    box = canvas.getbbox()
    if box is None:
        return Image.new("L", (1, 1))
    canvas = canvas.crop(box)
    scale = 80 / max(canvas.size)
    size = (max(1, round(canvas.width * scale)), max(1, round(canvas.height * scale)))
    return canvas.resize(size, Image.Resampling.BILINEAR)


def shape_of(letter: str, face: Path) -> np.ndarray:
    glyph = draw(letter, face)
    canvas = Image.new("L", (84, 84))
    canvas.paste(glyph, ((84 - glyph.width) // 2, (84 - glyph.height) // 2))
    return np.asarray(canvas) > 127


def is_known(shape: np.ndarray, split: str, shapes: list[np.ndarray], splits: list[str]) -> bool:
    if not shapes:
        return False
    others = np.stack(shapes)
    overlap = (others & shape).sum((1, 2)) / (others | shape).sum((1, 2))
    limit = np.where(np.array(splits) == split, SAME_SHAPE_IN_SPLIT, SAME_SHAPE_ACROSS)
    return bool((overlap > limit).any())


def warp(glyph: Image.Image, generator: np.random.Generator) -> np.ndarray:
    """Turn, shear, stretch and shift a little, shrink, threshold: (28, 28) bool."""
    canvas = Image.new("L", (CANVAS, CANVAS))
    canvas.paste(glyph, ((CANVAS - glyph.width) // 2, (CANVAS - glyph.height) // 2))
    angle = generator.uniform(-0.15, 0.15)
    shear = generator.uniform(-0.15, 0.15)
    stretch_x, stretch_y = generator.uniform(0.85, 1.15, 2)
    shift = generator.uniform(-7, 7, 2)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    matrix = turn @ np.array([[1, shear], [0, 1]]) @ np.diag([1 / stretch_x, 1 / stretch_y])
    middle = np.full(2, CANVAS / 2)
    offset = middle - matrix @ (middle + shift)
    coefficients = (*matrix[0], offset[0], *matrix[1], offset[1])
    warped = canvas.transform(canvas.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return np.asarray(warped.resize((SIZE, SIZE), Image.Resampling.BOX)) > 90


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [path for path in sorted(folder.glob("DejaVu*.ttf")) if "Display" not in path.name]
    faces = {path: set(TTFont(path).getBestCmap()) for path in files}
    plain = folder / "DejaVuSans.ttf"
    kept: list[np.ndarray] = []
    classes: list[tuple[str, str]] = []
    images = []
    generator = np.random.default_rng(SEED)
    for script, letters in letters_by_script(faces).items():
        for letter in letters:
            if ord(letter) not in faces[plain]:
                continue
            shape, split = shape_of(letter, plain), SPLIT_OF_SCRIPT[script]
            if not shape.any() or is_known(shape, split, kept, [known for _, known in classes]):
                continue
            kept.append(shape)
            classes.append((unicodedata.name(letter), split))
            drawn = [draw(letter, face) for face, covered in faces.items() if ord(letter) in covered]
            choices = generator.permutation(np.arange(IMAGES_PER_CLASS) % len(drawn))
            images.append([warp(drawn[choice], generator) for choice in choices])
    bits = np.packbits(np.array(images).reshape(-1, SIZE * SIZE), axis=1)
    names, splits = zip(*classes, strict=True)
    np.savez_compressed(TARGET, bits=bits, names=np.array(names), splits=np.array(splits))
    counts = {split: splits.count(split) for split in ("train", "val", "test")}
    print(f"{TARGET.name}: {len(names)} letters ({counts}), {TARGET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
