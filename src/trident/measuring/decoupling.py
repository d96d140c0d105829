"""How well each latent separates the classes (the paper's decoupling analysis).

Takes the latent means of a task's queries before and after adaptation, and computes the Davies-Bouldin scores of
z_label and z_semantic: lower means better separated classes. If the latents are decoupled as the paper claims,
adaptation improves the score of z_label and does not change that of z_semantic. The change is averaged over many tasks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from trident.data.store import ImageStore
from trident.engines.workers import parallel_map
from trident.errors import NotFiniteError, TridentError
from trident.importing import needed
from trident.learning.checkpoint import Checkpoint
from trident.measuring.latents import LatentLearner, as_array, query_latents, set_up
from trident.measuring.prediction import chunks_of
from trident.measuring.record import mean_and_interval
from trident.measuring.subject import Sample, default_chunk, protocol_in_words
from trident.nn.parameters import Parameters
from trident.progress import Progress
from trident.tasks.task import Batch

LATENTS = ("label", "semantic")


class LatentMeans(NamedTuple):
    """Means of both latents of the queries: (task, query, latent) each."""

    label: np.ndarray
    semantic: np.ndarray


class TaskLatents(NamedTuple):
    before: LatentMeans
    after: LatentMeans
    labels: np.ndarray  # (task, query)


@dataclass(frozen=True)
class ScoreChange:
    """The Davies-Bouldin score of one latent in its own space, over many tasks; lower is better."""

    before: float
    after: float
    change: float  # after - before, paired by task
    change_ci95: float


@dataclass(frozen=True)
class Decoupling:
    """The latents of one task, and the mean change of the score over all tasks."""

    shown: TaskLatents  # the first task that has a score
    changes: dict[str, ScoreChange]  # by latent
    difference: tuple[float, float]  # score of z_label minus that of z_semantic after adaptation, and its interval
    tasks: int
    left_out: int  # tasks without a score: fewer than two classes had queries
    protocol: str

    def verdict(self) -> str:
        parts = [
            f"adaptation {'changes' if abs(change.change) > change.change_ci95 else 'does not measurably change'} "
            f"the Davies-Bouldin score of z_{name}: {change.before:.4f} before, {change.after:.4f} after, "
            f"{change.change:+.4f} ± {change.change_ci95:.4f}"
            for name, change in self.changes.items()
        ]
        changes = "; ".join(parts)
        difference, ci95 = self.difference
        end = f"Classes are better separated in z_{'label' if difference < 0 else 'semantic'}"
        if abs(difference) <= ci95:
            end = "Classes are separated equally well in both, as far as these tasks tell"
        return f"{changes[0].upper()}{changes[1:]}. {end}: {difference:+.4f} ± {ci95:.4f}."

    def shown_points(self) -> dict[str, np.ndarray]:
        """The shown latents (query, latent), by what they are, for example "z_label before"."""
        times = {"before": self.shown.before, "after": self.shown.after}
        return {f"z_{name} {when}": getattr(times[when], name)[0] for name in LATENTS for when in times}

    def to_json(self) -> dict[str, Any]:
        return {
            "davies_bouldin": {name: vars(change) for name, change in self.changes.items()},
            "label_minus_semantic": {"difference": self.difference[0], "ci95": self.difference[1]},
            "tasks": self.tasks,
            "left_out": self.left_out,
            "protocol": self.protocol,
            "verdict": self.verdict(),
        }


def latent_means(learner: LatentLearner, parameters: Parameters, batch: Batch) -> TaskLatents:
    """The queries' latent means before the first inner step and after the last."""
    trajectory = learner.adapt(parameters, batch.task)

    def means(adapted: Parameters) -> LatentMeans:
        latents = query_latents(learner, adapted, batch.task)
        return LatentMeans(*(as_array(part.loc[:, latents.n_context :]) for part in (latents.label, latents.semantic)))

    return TaskLatents(means(trajectory[0][0]), means(trajectory[-1][0]), batch.labels.queries.cpu().numpy())


def davies_bouldin(points: np.ndarray, labels: np.ndarray) -> float:
    """The score of points (query, latent) with classes (query,)."""
    metrics = needed("sklearn.metrics", "the Davies-Bouldin score needs scikit-learn")
    return float(metrics.davies_bouldin_score(points, labels))


def decoupling(
    checkpoint: Checkpoint,
    store: ImageStore,
    progress: Progress | None = None,
    **sample: Unpack[Sample],
) -> Decoupling:
    learner, parameters, source, recipe = set_up(checkpoint, store, sample)
    split, tasks, device = sample["split"], sample["tasks"], source.device
    shown: TaskLatents | None = None
    scores = []  # of each task that has them: (latent, 2), before and after
    chunks = chunks_of(tasks, sample.get("tasks_per_chunk") or default_chunk(recipe, device))

    def means(indices: range) -> TaskLatents:
        return latent_means(learner, parameters, source.batch(indices))

    for indices, latents in zip(chunks, parallel_map(means, chunks, device), strict=True):
        times = latents.before, latents.after
        if not all(np.isfinite(part).all() for when in times for part in when):
            raise NotFiniteError(f"{split} tasks {indices.start} to {indices.stop - 1}: latents are not finite")
        for task, labels in enumerate(latents.labels):
            if 2 <= len(np.unique(labels)) < len(labels):
                before, after = (LatentMeans(*(part[[task]] for part in when)) for when in times)
                shown = shown or TaskLatents(before, after, labels[None])
                pairs = zip(before, after, strict=True)
                scores.append([[davies_bouldin(one[0], labels) for one in pair] for pair in pairs])
        if progress:
            progress(indices.stop, tasks)
    scored = len(scores)
    if scored < 2 or shown is None:
        raise TridentError(
            "there is no Davies-Bouldin score of tasks whose queries are of one class, or all of different ones: "
            f"{scored} of {tasks} tasks have one, and an interval needs two"
        )
    label, semantic = np.array(scores).transpose(1, 2, 0)  # (2, task) each
    changes = {
        name: ScoreChange(float(before.mean()), float(after.mean()), *mean_and_interval(after - before))
        for name, (before, after) in zip(LATENTS, (label, semantic), strict=True)
    }
    difference = mean_and_interval(label[1] - semantic[1])
    protocol = protocol_in_words(store.dataset, split, recipe, scored, sample["seed"])
    return Decoupling(shown, changes, difference, scored, tasks - scored, protocol)


def project(points: np.ndarray, seed: int) -> np.ndarray:
    """UMAP projection: (query, latent) -> (query, 2)."""
    umap = needed("umap", "the projection needs umap-learn")
    neighbours = min(15, len(points) - 1)
    # Few points start at random: the spectral start needs more points than latents.
    projection = umap.UMAP(n_neighbors=neighbours, random_state=seed % 2**32, n_jobs=1, init="random")
    return np.asarray(projection.fit_transform(points))


def projected_panels(result: Decoupling, seed: int) -> list[tuple[str, np.ndarray]]:
    """Titles, and projected points (query, 2), of the shown latents. Titles have the scores in both spaces."""
    labels = result.shown.labels[0]
    panels = []
    for name, points in result.shown_points().items():
        plane = project(points, seed)
        score, projected_score = davies_bouldin(points, labels), davies_bouldin(plane, labels)
        panels.append((f"{name}\nDBI {score:.2f}, of projection {projected_score:.2f}", plane))
    return panels
