"""Draw pictures that belong to nobody, to show the program with: `python tools/draw_pictures.py FOLDER`.

Four kinds of things, one folder each, no two pictures alike. For screenshots in the documentation; nothing is measured
on them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE, DRAWN_AT = 320, 640
PER_KIND = 8
Colour = tuple[int, int, int]


def shade(random: np.random.Generator, colour: Colour, spread: float = 0.15) -> Colour:
    r, g, b = (np.array(colour) * random.uniform(1 - spread, 1 + spread) + random.normal(0, 6, 3)).clip(0, 255)
    return int(r), int(g), int(b)


def any_colour(random: np.random.Generator, likely: Colour, other: Colour) -> Colour:
    """Somewhere between the colour that one would expect and quite another, so that colour alone tells little."""
    share = random.beta(0.7, 0.9)
    r, g, b = (1 - share) * np.array(likely) + share * np.array(other)
    return shade(random, (int(r), int(g), int(b)))


def gradient(top: Colour, bottom: Colour) -> Image.Image:
    share = np.linspace(0, 1, DRAWN_AT)[:, None, None]
    rows = np.array(top) * (1 - share) + np.array(bottom) * share
    return Image.fromarray(np.broadcast_to(rows, (DRAWN_AT, DRAWN_AT, 3)).astype(np.uint8))


def hills(draw: ImageDraw.ImageDraw, random: np.random.Generator, height: float, colour: Colour) -> None:
    x = np.arange(0, DRAWN_AT + 8, 8)
    waves = np.zeros(len(x))
    for _ in range(3):
        waves += random.uniform(8, 40) * np.sin(x / random.uniform(40, 160) + random.uniform(0, 6))
    line = [(float(a), float(b)) for a, b in zip(x, height * DRAWN_AT + waves, strict=True)]
    draw.polygon([*line, (DRAWN_AT, DRAWN_AT), (0, DRAWN_AT)], fill=colour)


def sunset(random: np.random.Generator) -> Image.Image:
    image = gradient(
        any_colour(random, (60, 40, 110), (90, 150, 200)), any_colour(random, (250, 150, 70), (230, 200, 200))
    )
    draw = ImageDraw.Draw(image)
    x, y, r = random.uniform(120, 520), random.uniform(230, 380), random.uniform(40, 80)
    draw.ellipse((x - r, y - r, x + r, y + r), fill=shade(random, (255, 225, 150), 0.05))
    hills(draw, random, random.uniform(0.62, 0.7), shade(random, (80, 45, 80)))
    hills(draw, random, random.uniform(0.76, 0.86), shade(random, (35, 22, 45)))
    return image


def leaf(random: np.random.Generator) -> Image.Image:
    image = gradient(
        any_colour(random, (120, 90, 60), (120, 150, 190)), any_colour(random, (90, 70, 50), (150, 150, 150))
    )
    for _ in range(int(random.integers(1, 4))):
        green, length = any_colour(random, (70, 140, 50), (190, 90, 40)), random.uniform(320, 520)
        width = length * random.uniform(0.3, 0.45)
        layer = Image.new("RGBA", (DRAWN_AT, DRAWN_AT))
        draw, middle = ImageDraw.Draw(layer), DRAWN_AT / 2
        along = np.linspace(-1, 1, 60)
        side = width / 2 * (1 - along**2) ** 0.8
        edge = [(middle + length / 2 * a, middle + s) for a, s in zip(along, side, strict=True)]
        edge += [(middle + length / 2 * a, middle - s) for a, s in zip(along[::-1], side[::-1], strict=True)]
        draw.polygon(edge, fill=(*green, 255))
        vein = (*shade(random, (170, 200, 120), 0.1), 255)
        draw.line((middle - length / 2, middle, middle + length * 0.6, middle), fill=vein, width=6)
        for a in np.linspace(-0.7, 0.7, 8):
            x, reach = middle + length / 2 * a, width * 0.38 * (1 - a**2)
            for sign in (-1, 1):
                draw.line((x, middle, x - reach * 0.8, middle + sign * reach), fill=vein, width=3)
        turned = layer.rotate(float(random.uniform(0, 360)), Image.Resampling.BICUBIC)
        x, y = random.normal(0, 60, 2)
        image.paste(turned, (int(x), int(y)), turned)
    return image


def courses(random: np.random.Generator, stretch: float, offset: float, gap: int) -> Image.Image:
    """Stones so many times as wide as high, each row moved by part of a stone against the last."""
    image = Image.new("RGB", (DRAWN_AT, DRAWN_AT), shade(random, (190, 180, 165)))
    draw, colour = ImageDraw.Draw(image), any_colour(random, (165, 75, 55), (120, 130, 140))
    height = int(random.uniform(50, 90))
    width = int(height * stretch)
    for row, y in enumerate(range(-10, DRAWN_AT, height)):
        for x in range(-width + int(row % 2 * width * offset), DRAWN_AT, width):
            draw.rectangle((x, y, x + width - gap, y + height - gap), fill=shade(random, colour, 0.18))
    return image.rotate(float(random.normal(0, 4)), Image.Resampling.BICUBIC, fillcolor=colour)


def bricks(random: np.random.Generator) -> Image.Image:
    return courses(random, float(random.uniform(2.0, 2.6)), 0.5, 8)


def tiles(random: np.random.Generator) -> Image.Image:
    return courses(random, float(random.uniform(1.0, 1.4)), 0, 6)


KINDS: dict[str, Callable[[np.random.Generator], Image.Image]] = {
    "brick wall": bricks,
    "leaf": leaf,
    "sunset": sunset,
    "tiles": tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for place, (name, drawn) in enumerate(KINDS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(PER_KIND):
            random = np.random.default_rng([place, number])
            image = drawn(random).filter(ImageFilter.GaussianBlur(1))
            small = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            small.save(folder / name / f"IMG_{1000 + int(random.integers(9000))}.jpg", quality=90)


if __name__ == "__main__":
    main()
