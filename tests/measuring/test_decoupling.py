"""Latents around adaptation, and what the decoder makes of them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import davies_bouldin_score

from tiny import TINY_METHOD, TINY_RECIPE, tiny_store
from trident.errors import NotFiniteError, TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.decoupling import (
    Decoupling,
    ScoreChange,
    TaskLatents,
    davies_bouldin,
    decoupling,
    latent_means,
    projected_panels,
)
from trident.measuring.latents import query_latents, reconstructions, set_up
from trident.measuring.subject import Sample
from trident.methods.base import Method
from trident.methods.inner_loop.base import Inputs
from trident.methods.metric.protonet import ProtoNet
from trident.recipes.recipe import Recipe
from trident.report.figures import (
    latent_plot,
    reconstruction_pairs,
    reconstruction_plot,
    save_figure,
    swap_grid,
    to_svg,
)

METHOD = replace(TINY_METHOD, inner_rate=0.02, inner_steps=3)
SAMPLE: Sample = {"split": "test", "tasks": 1, "seed": 0}


def weights_of(recipe: Recipe) -> Checkpoint:
    return Checkpoint(recipe, recipe.initial(0), recipe.model.initial_running(), 0)


def untrained(batch_norm: str = "transductive", method: Method = METHOD) -> Checkpoint:
    protocol = replace(TINY_RECIPE.protocol, batch_norm=batch_norm)  # type: ignore[arg-type]
    return weights_of(replace(TINY_RECIPE, protocol=protocol, method=method))


def by_hand(points: np.ndarray, labels: np.ndarray) -> float:
    """Davies and Bouldin's definition, written out."""
    classes = np.unique(labels)
    centres = [points[labels == one].mean(0) for one in classes]
    spreads = [
        np.linalg.norm(points[labels == one] - centre, axis=1).mean()
        for one, centre in zip(classes, centres, strict=True)
    ]
    worst = [
        max((spreads[i] + spreads[j]) / np.linalg.norm(centres[i] - centres[j]) for j in range(len(classes)) if j != i)
        for i in range(len(classes))
    ]
    return float(np.mean(worst))


def test_davies_bouldin_score() -> None:
    generator = np.random.default_rng(0)
    for n_way in (2, 5):
        labels = np.repeat(np.arange(n_way), 7)
        points = generator.normal(size=(len(labels), 12)) + labels[:, None]
        assert davies_bouldin(points, labels) == pytest.approx(davies_bouldin_score(points, labels), abs=1e-12)
        assert davies_bouldin(points, labels) == pytest.approx(by_hand(points, labels), rel=1e-9)


@pytest.mark.parametrize("batch_norm", ["transductive", "support"])
def test_latents_before_and_after_adaptation(batch_norm: str) -> None:
    checkpoint, store = untrained(batch_norm), tiny_store()
    learner, parameters, source, _ = set_up(checkpoint, store, SAMPLE)
    batch = source.batch([0, 1])
    found = latent_means(learner, parameters, batch)
    assert found.before.label.shape == (2, 6, METHOD.label_latents)
    assert found.before.semantic.shape == (2, 6, METHOD.semantic_latents)
    assert not np.allclose(found.before.label, found.after.label)
    assert np.array_equal(found.labels, batch.labels.queries.numpy())
    # `before` is what the network as it was trained says of the queries, whatever the noise of the tasks is.
    shared = {key: value.expand(2, *value.shape) for key, value in parameters.items()}
    task = replace(batch.task, noise={name: torch.zeros_like(values) for name, values in batch.task.noise.items()})
    with torch.no_grad():
        output, _ = learner.model.infer(shared, Inputs(task, learner.statistics(task)))
    assert np.allclose(found.before.label, output.label.loc[:, output.n_context :].numpy(), atol=1e-6)


def test_the_change_of_the_score_over_many_tasks() -> None:
    checkpoint, store = untrained(), tiny_store()
    result = decoupling(checkpoint, store, split="test", tasks=7, seed=0, tasks_per_chunk=3)
    learner, parameters, source, _ = set_up(checkpoint, store, SAMPLE)
    found = latent_means(learner, parameters, source.batch(range(7)))
    for name in ("label", "semantic"):
        scores = [
            [by_hand(getattr(part, name)[task], found.labels[task]) for task in range(7)]
            for part in (found.before, found.after)
        ]
        change = np.subtract(scores[1], scores[0])
        assert result.changes[name].before == pytest.approx(np.mean(scores[0]), rel=1e-4)
        assert result.changes[name].change == pytest.approx(change.mean(), rel=1e-3, abs=1e-6)
        assert result.changes[name].change_ci95 == pytest.approx(1.96 * change.std(ddof=1) / np.sqrt(7), rel=1e-3)
    assert result.tasks == 7
    assert "latent means, 3 inner steps, 7 tasks, 95 % interval, seed 0" in result.protocol
    assert result.shown.labels.shape == (1, 6)


def test_what_the_verdict_says() -> None:
    nothing = np.zeros(0)
    changes = {"label": ScoreChange(1.5, 0.8, -0.7, 0.1), "semantic": ScoreChange(1.5, 1.49, -0.01, 0.1)}
    shown = TaskLatents(None, None, nothing)  # type: ignore[arg-type]
    said = Decoupling(shown, changes, (-0.69, 0.2), 10, 0, "").verdict()
    assert "Adaptation changes the Davies-Bouldin score of z_label" in said
    assert "does not measurably change the Davies-Bouldin score of z_semantic" in said
    assert "better separated in z_label: -0.6900 ± 0.2000" in said
    assert "equally well in both" in Decoupling(shown, changes, (-0.1, 0.2), 10, 0, "").verdict()


def test_tasks_without_a_score_are_told() -> None:
    checkpoint = untrained()
    episode = replace(checkpoint.recipe.episode, n_query=1)  # one query of each class: no clusters
    weights = weights_of(replace(checkpoint.recipe, episode=episode, method=replace(METHOD, attfex="off")))
    with pytest.raises(TridentError, match="all of different ones"):
        decoupling(weights, tiny_store(), split="test", tasks=2, seed=0)


def test_what_needs_all_queries_says_so() -> None:
    checkpoint = untrained()
    alone = replace(checkpoint.recipe, protocol=replace(checkpoint.recipe.protocol, queries_at_once="one"))
    for look in (
        lambda: decoupling(replace(checkpoint, recipe=alone), tiny_store(), split="test", tasks=2, seed=0),
        lambda: reconstructions(replace(checkpoint, recipe=alone), tiny_store(), split="test", seed=0),
    ):
        with pytest.raises(TridentError, match="accuracy and calibration only"):
            look()


def test_a_method_without_latents_says_so() -> None:
    checkpoint = untrained(method=ProtoNet())
    for look in (
        lambda: decoupling(checkpoint, tiny_store(), split="test", tasks=2, seed=0),
        lambda: reconstructions(checkpoint, tiny_store(), split="test", seed=0),
    ):
        with pytest.raises(TridentError, match="Prototypical Networks has no latents and no decoder"):
            look()


def test_latents_that_blow_up_are_told() -> None:
    checkpoint = untrained()
    wild = replace(checkpoint.recipe, method=replace(METHOD, inner_rate=1e20))
    with pytest.raises(NotFiniteError):
        decoupling(replace(checkpoint, recipe=wild), tiny_store(), split="test", tasks=2, seed=0)
    with pytest.raises(NotFiniteError):
        reconstructions(replace(checkpoint, recipe=wild), tiny_store(), split="test", seed=0)


@pytest.mark.soak
def test_projections_and_their_plot(tmp_path: Path) -> None:
    """Without a display: nothing here may open a window."""
    result = decoupling(untrained(), tiny_store(), split="test", tasks=2, seed=0)
    panels = projected_panels(result, seed=0)
    names = [title.partition("\n")[0] for title, _ in panels]
    assert names == ["z_label before", "z_label after", "z_semantic before", "z_semantic after"]
    labels = result.shown.labels[0]
    for title, points in panels:
        assert points.shape == (6, 2)
        assert np.isfinite(points).all()
        assert float(title.rpartition(" ")[2]) == pytest.approx(by_hand(points, labels), abs=0.006)
    again = projected_panels(result, seed=0)
    assert np.array_equal(again[0][1], panels[0][1])
    figure = latent_plot(panels, labels)
    for name in ("latents.svg", "latents.png", "latents.pdf"):
        save_figure(figure, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(TridentError, match="must end with one of"):
        save_figure(figure, tmp_path / "latents.doc")
    svg = to_svg(figure, "latents")
    assert svg.startswith("<svg") and "currentColor" in svg and "z_semantic after" in svg


def test_plots_need_no_display(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from trident.report.figures import latent_plot, save_figure\n"
        "save_figure(latent_plot([('a', np.eye(2))], np.arange(2)), Path('figure.png'))\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment["MPLBACKEND"] = "TkAgg"  # a backend that opens windows, were anyone to ask for one
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "figure.png").is_file()


@pytest.mark.parametrize("batch_norm", ["transductive", "support"])
def test_queries_are_decoded_as_in_training(batch_norm: str) -> None:
    """Refinement takes in the support images too, but the decoder's batch norm must not see them for that."""
    refined = replace(METHOD, classifier_start="prototypes", attfex="set", refinements=2, decoder_batch_norm=True)
    checkpoint, store = untrained(batch_norm, refined), tiny_store()
    learner, parameters, source, recipe = set_up(checkpoint, store, SAMPLE)
    task = source.batch([0]).task
    adapted, _ = learner.adapt(parameters, task)[-1]
    latents = query_latents(learner, adapted, task)
    assert latents.n_context == task.n_support
    with torch.no_grad():
        expected, _ = learner.model.decode(adapted, latents, learner.statistics(task))
    found = reconstructions(checkpoint, store, split="test", seed=0)
    assert np.allclose(found.reconstructed, expected[0].numpy(), atol=1e-6)
    assert "latent means" in found.protocol and recipe.protocol.latents == "mean"


@pytest.mark.parametrize("batch_norm", ["transductive", "support", "running"])
def test_reconstructions_and_swaps(batch_norm: str, tmp_path: Path) -> None:
    checkpoint, store = untrained(batch_norm), tiny_store()
    found = reconstructions(checkpoint, store, split="test", seed=0)
    assert found.images.shape == found.reconstructed.shape == (6, 16, 16, 1)
    assert found.reconstructed.min() >= 0 and found.reconstructed.max() <= 1
    assert sorted(found.labels[found.chosen]) == [0, 1, 2]
    assert found.swapped.shape == (3, 3, 16, 16, 1)
    error = np.square(found.images - found.reconstructed).sum((1, 2, 3)).mean()
    assert found.squared_error == pytest.approx(error, rel=1e-5)
    if batch_norm == "running":  # where pictures do not depend on which others are decoded with them
        for place, query in enumerate(found.chosen):
            assert np.allclose(found.swapped[place, place], found.reconstructed[query], atol=1e-5)
    assert not np.array_equal(found.swapped[0, 1], found.swapped[1, 0])
    assert reconstruction_pairs(found, columns=4).shape == (4 * 16, 4 * 16, 1)
    assert swap_grid(found).shape == (4 * 16, 4 * 16, 1)
    save_figure(reconstruction_plot(found), tmp_path / "pictures.png")
    assert (tmp_path / "pictures.png").stat().st_size > 1000
