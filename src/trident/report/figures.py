"""Figures by matplotlib, without a display. SVG figures take their text colour from the page."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trident.errors import TridentError
from trident.files import atomic_file, check_writable
from trident.importing import needed

if TYPE_CHECKING:
    from trident.measuring.audit import Audit
    from trident.measuring.calibration import Calibration
    from trident.measuring.latents import Reconstructions

# Based on Okabe and Ito's colours for colour-blind people; visible on white and on dark pages.
COLOURS = ("#1F83C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
KINDS = (".svg", ".png", ".pdf")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_NEEDED = "figures need matplotlib"
_INK = "#010203"  # replaced by the page's text colour in SVG
_STYLE: Any = {  # matplotlib's own names for settings
    "svg.hashsalt": "trident",
    "text.parse_math": False,  # a dollar in a run's name is a dollar
    "svg.fonttype": "none",  # text stays text: small, sharp, selectable
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in our style, whatever the user's matplotlib settings are; as a decorator, all of a function."""
    matplotlib = needed("matplotlib", _NEEDED)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def style_of(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure (size in inches) and its axes, without pyplot: no display, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


@styled()
def to_svg(figure: Any, name: str) -> str:
    """An <svg> element for a page. `name` makes its ids unique on the page."""
    import matplotlib

    buffer = io.StringIO()
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font: \1px inherit", svg)
    svg = re.sub(r'\bid="(?!p[0-9a-f]{10})', f'id="{name}-', svg)  # the salt makes hashed ids unique
    svg = re.sub(r'href="#(?!p[0-9a-f]{10})', f'href="#{name}-', svg)
    return re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)


def check_figure_path(path: Path) -> None:
    """Check before long work that a figure can be drawn to this file."""
    needed("matplotlib", _NEEDED)
    if path.suffix.lower() not in KINDS:
        raise TridentError(f"cannot draw {path}: its name must end with one of {', '.join(KINDS)}")
    check_writable(path)


@styled()
def save_figure(figure: Any, path: Path) -> None:
    """Save in the format of the file's ending, on white."""
    check_figure_path(path)
    kind = path.suffix.removeprefix(".").lower()
    with atomic_file(path) as file:
        # Without a date, so that the same figure gives the same file.
        metadata = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else None
        figure.savefig(file, format=kind, dpi=150, facecolor="white", metadata=metadata)


@styled()
def learning_curves(lines: Sequence[dict[str, Any]]) -> Any:
    """Accuracy and loss parts over the steps of a run, from the lines of its log."""
    figure, (top, bottom) = new_figure(5.2, 4.6, 2, 1, sharex=True)
    train = [line for line in lines if line["kind"] == "train"]
    steps = [line["step"] for line in train]
    top.plot(steps, [line["accuracy"] for line in train], color=COLOURS[0], alpha=0.7, label="training queries")
    if any(line["kind"] == "validation" for line in lines):
        _validation_curve(top, lines, "validation classes", {"color": COLOURS[1], "marker": MARKERS[0]})
    top.set_ylabel("accuracy, %")
    top.legend(loc="lower right")
    names = dict.fromkeys(name for line in train for name in line["losses"])
    parts = [name for name in names if name != "total"] or list(names)  # a loss without parts has only its total
    for place, name in enumerate(parts):
        values = np.array([line["losses"].get(name, np.nan) for line in train], float)
        if np.any(values != 0):  # a part that is always 0 was not used
            colour = COLOURS[place % len(COLOURS)]
            bottom.plot(steps, np.maximum(values, 1e-3), color=colour, label=name.replace("_", " "))
    bottom.set_yscale("log")
    bottom.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the default writes TeX
    bottom.yaxis.set_minor_formatter(lambda value, _: "")
    bottom.set_ylabel("loss parts, unweighted")
    bottom.set_xlabel("training steps")
    figure.legend(*bottom.get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1)
    return figure


@styled()
def compared_curves(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> Any:
    """Validation accuracy over the steps of some runs."""
    figure, axes = new_figure(5.2, 3.2)
    for place, (name, lines) in enumerate(runs):
        _validation_curve(axes, lines, name, style_of(place))
    axes.set_xlabel("training steps")
    axes.set_ylabel("validation accuracy, %")
    axes.legend(loc="lower right")
    return figure


def _validation_curve(axes: Any, lines: Sequence[dict[str, Any]], label: str, style: dict[str, str]) -> None:
    points = [(line["step"], line["accuracy"], line["ci95"]) for line in lines if line["kind"] == "validation"]
    steps, accuracies, intervals = zip(*points, strict=True) if points else ([], [], [])
    axes.errorbar(steps, accuracies, intervals, label=label, markersize=4, capsize=2, **style)


@styled()
def audit_chart(audit: "Audit") -> Any:
    """Accuracy of each protocol with its interval."""
    rows = audit.rows[::-1]
    figure, axes = new_figure(5.2, 0.34 * len(rows) + 0.8)
    places = np.arange(len(rows))
    default = audit.rows[0].evaluation.accuracy
    axes.axvline(default, color=_INK, linewidth=0.8, linestyle=":")
    for place, row in zip(places, rows, strict=True):
        colour = COLOURS[1] if abs(row.difference) > row.difference_ci95 else COLOURS[0]
        value = row.evaluation
        axes.errorbar(value.accuracy, place, xerr=value.ci95, fmt="o", color=colour, capsize=3, markersize=5)
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("accuracy, %")
    axes.grid(axis="y", visible=False)
    return figure


@styled()
def reliability_diagram(calibrations: Sequence[tuple[str, "Calibration"]]) -> Any:
    """Accuracy against confidence, and how many predictions each bin holds; one panel for each calibration."""
    n = len(calibrations)
    figure, grid = new_figure(2.6 * n, 3.4, 2, n, sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1))
    for (title, calibration), (top, bottom) in zip(calibrations, grid.T, strict=True):
        bins = calibration.bins
        width = 1 / len(bins.count)
        left = np.arange(len(bins.count)) * width
        filled = bins.count > 0
        top.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=":")
        top.bar(left[filled], bins.accuracy[filled], width * 0.94, align="edge", color=COLOURS[0], alpha=0.75)
        top.plot(bins.confidence[filled], bins.accuracy[filled], "o", color=COLOURS[1], markersize=4)
        top.set_title(f"{title}\nECE {calibration.ece:.3f}, MCE {calibration.mce:.3f}", fontsize=9)
        top.set_ylim(0, 1.02)
        bottom.bar(left, bins.count / bins.count.sum(), width * 0.94, align="edge", color=COLOURS[7], alpha=0.75)
        bottom.set_xlabel("confidence")
        bottom.set_xlim(0, 1)
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("share")
    return figure


@styled()
def latent_plot(panels: Sequence[tuple[str, np.ndarray]], labels: np.ndarray) -> Any:
    """Points (query, 2) in some panels, two in a row; colour and marker show the class."""
    rows = -(-len(panels) // 2)
    figure, grid = new_figure(5.4, 2.7 * rows, rows, 2, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for (title, points), axes in zip(panels, grid.flat, strict=False):
        for place, label in enumerate(np.unique(labels)):
            axes.scatter(*points[labels == label].T, s=26, alpha=0.85, linewidths=0, **style_of(place))
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


@styled()
def reconstruction_plot(result: "Reconstructions") -> Any:
    """Left: queries above their reconstructions. Right: z_label by row, z_semantic by column."""
    figure, (left, right) = new_figure(9, 5, 1, 2)
    left.imshow(picture(reconstruction_pairs(result, columns=5)), interpolation="nearest")
    left.set_title("queries, and below each its reconstruction", fontsize=9)
    right.imshow(picture(swap_grid(result)), interpolation="nearest")
    right.set_title("z_label of the row's image, z_semantic of the column's", fontsize=9)
    for axes in (left, right):
        axes.axis("off")
    return figure


def reconstruction_pairs(result: "Reconstructions", columns: int) -> np.ndarray:
    """Rows of at most ten queries, each row above that of their reconstructions: (h, w, c)."""
    rows = []
    for start in range(0, min(10, len(result.images)), columns):
        for source in (result.images, result.reconstructed):
            row = source[start : start + columns]
            padding = np.zeros((columns - len(row), *row.shape[1:]), row.dtype)
            rows.append(np.concatenate([*row, *padding], 1))
    return np.concatenate(rows, 0)


def swap_grid(result: "Reconstructions") -> np.ndarray:
    """The chosen images along the top and the left, the swapped pictures where they meet: (h, w, c)."""
    chosen = result.images[result.chosen]
    corner = np.zeros_like(chosen[0])
    rows = [np.concatenate([corner, *chosen], 1)]
    rows += [np.concatenate([image, *row], 1) for image, row in zip(chosen, result.swapped, strict=True)]
    return np.concatenate(rows, 0)


def picture(pixels: np.ndarray) -> np.ndarray:
    """Values in 0 .. 1, one channel or three, as uint8 RGB."""
    rgb = np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels
    return np.asarray((255 * np.clip(rgb, 0, 1)).round(), np.uint8)
