"""The figures of the document and of the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from studies.reproduction.correlation import correlations, published_and_ours
from studies.reproduction.panels import Model, Reproduction
from studies.reproduction.paper_results import find
from studies.reproduction.results import ORDER_NAMES, ORDERS, Latents, read
from trident.report.figures import COLOURS, latent_plot, new_figure, styled


def all_plots(reproduction: Reproduction, folder: Path) -> dict[str, Any]:
    """The figures, by name, for which there are results: the effect of the query order, ablations and latents."""
    found = {"order": order_plot(reproduction, folder), "ablations": ablation_plot(reproduction, folder)}
    found["separation"] = separation_plot(reproduction, folder)
    found |= latent_plots(reproduction, folder)
    return {name: figure for name, figure in found.items() if figure is not None}


@styled()
def order_plot(reproduction: Reproduction, folder: Path) -> Any:
    """Published accuracy, ours on sorted queries and ours on the same queries shuffled."""
    bars = []
    for panel in reproduction.panels:
        for model in reproduction.models_of(panel) if panel.kind == "accuracy" else ():
            kept = read(model.name, folder)
            if kept is None:
                continue
            for dataset, found in kept.measured.items():
                printed = find(table="accuracy", method="TRIDENT", test_dataset=dataset, n_shot=kept.n_shot)
                name = f"{model.name.replace('-', ' ')}, {dataset}"
                published = printed[0].value if printed and kept.trained_order == "class_sorted" else None
                bars.append((name, published, found.orders))
    if not bars:
        return None
    figure, axis = new_figure(8, 1 + 0.55 * len(bars))
    for place, (_, published, measured) in enumerate(reversed(bars)):
        for shift, colour, order in zip((0.17, -0.17), COLOURS, ORDERS, strict=False):
            if order in measured:
                one, label = measured[order], f"ours, {ORDER_NAMES[order]}" if place == 0 else None
                axis.barh(place + shift, one.accuracy, 0.32, xerr=one.ci95, color=colour, label=label)
        if published is not None:
            axis.plot([published] * 2, [place - 0.35, place + 0.35], "k-", linewidth=2.2)
    axis.axvline(20, linestyle=":", linewidth=1, color="grey")
    axis.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)])
    axis.set_xlim(0, 100)
    axis.set_xlabel("accuracy, %; black: published; dotted: chance")
    axis.legend(loc="lower right")
    return figure


@styled()
def ablation_plot(reproduction: Reproduction, folder: Path) -> Any:
    """Published against ours, a column for each ablation."""
    panels = [panel for panel in reproduction.panels if panel.kind == "ablation"]
    points = {
        panel.name: {order: published_and_ours(reproduction, [panel], folder, order) for order in ORDERS}
        for panel in panels
    }
    shown = [panel for panel in panels if points[panel.name]["shuffled"]]
    if not shown:
        return None
    figure, axes = new_figure(3.1 * len(shown), 3.4, 1, len(shown), squeeze=False)
    for axis, panel in zip(axes[0], shown, strict=True):
        for order, colour in zip(ORDERS, COLOURS, strict=False):
            pairs = points[panel.name][order]
            published, ours = [one.value for one, _ in pairs], [value for _, value in pairs]
            axis.plot(published, ours, "o", color=colour, label=ORDER_NAMES[order])
        said = ", ".join(f"{one.rho:+.2f}" for one in correlations(reproduction, [panel], folder))
        axis.set_title(f"{panel.name.removeprefix('ablation-')}" + (f"\nSpearman {said}" if said else ""), fontsize=10)
        axis.set_xlabel("published, %")
    axes[0][0].set_ylabel("ours, %")
    axes[0][0].legend(fontsize=8)
    return figure


@styled()
def separation_plot(reproduction: Reproduction, folder: Path) -> Any:
    """How well the latents separate the classes, before and after adaptation: an arrow for each model and order."""
    arrows = [
        (f"trained {model.name.replace('-', ' ')},\nmeasured {ORDER_NAMES[order]}", scores["davies_bouldin"])
        for model, latents in latents_of(reproduction, folder)
        for order, scores in latents.scores.items()
    ]
    if not arrows:
        return None
    figure, axis = new_figure(8.5, 1.2 + 0.6 * len(arrows))
    for place, (_, scores) in enumerate(reversed(arrows)):
        for shift, colour, (latent, score) in zip((0.14, -0.14), COLOURS, scores.items(), strict=False):
            at = place + shift
            line = {"arrowstyle": "->", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", (score["after"], at), (score["before"], at), arrowprops=line)
            axis.plot(score["before"], at, "o", color=colour, label=f"z_{latent}" if place == 0 else None)
    axis.set_yticks(range(len(arrows)), [name for name, _ in reversed(arrows)])
    axis.set_xlim(0)
    axis.set_ylim(-0.5, len(arrows) - 0.5)
    axis.set_xlabel("Davies-Bouldin score, dot: before, tip: after adaptation; lower: classes better separated")
    axis.legend(loc="lower left")
    return figure


def latent_plots(reproduction: Reproduction, folder: Path) -> dict[str, Any]:
    """The projected latents of one task, for each model and order of the queries."""
    found = {}
    for model, latents in latents_of(reproduction, folder):
        for order, points in latents.points.items():
            places = [(one["title"], np.array(one["places"])) for one in points]
            found[_latent_plot_name(model, order)] = latent_plot(places, np.array(latents.labels[order]))
    return found


def latent_captions(reproduction: Reproduction, folder: Path) -> dict[str, str]:
    """What each of these plots shows."""
    return {
        _latent_plot_name(model, order): f"Latents of one task's queries before and after adaptation: two principal "
        f"components. Model {model.name}, queries {ORDER_NAMES[order]}."
        for model, latents in latents_of(reproduction, folder)
        for order in latents.points
    }


def _latent_plot_name(model: Model, order: str) -> str:
    return f"latents-{model.name}-{order.replace('_', '-')}"


def latents_of(reproduction: Reproduction, folder: Path) -> Iterator[tuple[Model, Latents]]:
    """The models whose latents were measured, and what was found."""
    for panel in reproduction.panels:
        for model in reproduction.models_of(panel) if panel.kind == "latents" else ():
            kept = read(model.name, folder)
            if kept is not None and panel.dataset in kept.latents:
                yield model, kept.latents[panel.dataset]


def decoded_pictures(reproduction: Reproduction, folder: Path) -> dict[str, str]:
    """Decoded images of one task for each model: a JPEG in base64."""
    found = {}
    for panel in reproduction.panels:
        for model in reproduction.models_of(panel) if panel.kind == "reconstructions" else ():
            kept = read(model.name, folder)
            if kept is not None and panel.dataset in kept.reconstructions:
                found[model.name] = kept.reconstructions[panel.dataset].picture
    return found
