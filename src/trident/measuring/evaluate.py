"""Accuracy on many tasks, with its 95 % interval and the protocol it was obtained under."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Unpack

import numpy as np

import trident
from trident.data.store import ImageStore
from trident.distributed.processes import ALONE, Processes, shared
from trident.engines.execution import Execution
from trident.engines.fused import why_not_fused
from trident.engines.workers import parallel_map
from trident.errors import NotFiniteError, TridentError
from trident.measuring.prediction import chunks_of
from trident.measuring.record import Record, mean_and_interval, packed
from trident.measuring.subject import Measurable, Prepared, Sample, Subject, TrainedModel, protocol_in_words, subject_of
from trident.nn.parameters import Parameters
from trident.progress import Progress, StoppedError
from trident.recipes.recipe import Recipe
from trident.settings import Protocol
from trident.tasks.episodes import UNLABELLED
from trident.tasks.task import Batch


@dataclass(frozen=True)
class Predictions:
    """A model's predictions for the queries of some tasks, and the true labels."""

    log_probabilities: np.ndarray  # (task, query, n_way) float64
    labels: np.ndarray  # (task, query) int64

    @property
    def hits(self) -> np.ndarray:
        """The number of right answers in each task: (task,)."""
        return np.asarray((self.log_probabilities.argmax(2) == self.labels).sum(1))

    @property
    def accuracies(self) -> np.ndarray:
        """The accuracy in each task, in percent: (task,)."""
        return np.asarray(100 * (self.hits / self.labels.shape[1]))


@dataclass(frozen=True)
class Evaluation:
    """An accuracy and everything needed to reproduce it."""

    accuracy: float  # percent
    ci95: float  # half width, percent
    tasks: int
    dataset: str
    split: str
    fingerprint: str
    subject: Subject = field(repr=False, compare=False)
    seed: int
    execution: Execution
    predictions: Predictions = field(repr=False, compare=False)

    def describe_protocol(self) -> str:
        return protocol_in_words(self.dataset, self.split, self.subject, self.tasks, self.seed)

    def points_above(self, other: "Evaluation") -> tuple[float, float]:
        """The difference of two accuracies on the same tasks with its 95 % interval, paired by task."""
        return mean_and_interval(self.predictions.accuracies - other.predictions.accuracies)

    def record(self, **further: Any) -> Record:
        """What is kept of this accuracy; `further` are other fields of the record."""
        own = {
            "described": self.describe_protocol(),
            "tasks": self.tasks,
            "data": self.fingerprint,
            "execution": asdict(self.execution),
            "queries": self.predictions.labels.shape[1],
            "hits": packed(self.predictions.hits),
            "trident": trident.__version__,
        }
        return Record(**self.for_log() | own | further)

    def to_json(self) -> dict[str, Any]:
        return self.record().to_json()

    def for_log(self) -> dict[str, Any]:
        """The short form, without the tasks one by one."""
        protocol = {
            **{"dataset": self.dataset, "split": self.split, "fingerprint": self.fingerprint},
            **asdict(self.subject.episode),
            **asdict(self.subject.protocol),
            **{"tasks": self.tasks, "seed": self.seed},
            **self.subject.settings_json(),
        }
        execution = {"engine": self.execution.engine, "precision": self.execution.precision}
        return {"accuracy": self.accuracy, "ci95": self.ci95, "protocol": protocol, "execution": execution}


def evaluate(
    model: Measurable,
    store: ImageStore,
    protocol: Protocol | None = None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
    stream: str | None = None,
    **sample: Unpack[Sample],
) -> Evaluation:
    """Accuracy of a model on tasks from one split, under its own protocol or another.

    The model is a checkpoint, or a `PredictFunction` that wraps your own function. With several processes, all call
    this function: each computes a part of the tasks, and each gets the whole result. `stream` is the random stream that
    draws the tasks, by default the split's own.
    """
    subject = subject_of(model, protocol)
    split, tasks, seed = sample["split"], sample["tasks"], sample["seed"]
    prepared = processes.on_each(lambda: subject.prepare(store, sample, stream))
    execution = prepared.execution
    processes.check_same({"the engine": execution.engine, "the precision": execution.precision})
    predictions = _predictions(prepared, sample, progress, processes)
    accuracy, ci95 = mean_and_interval(predictions.accuracies)
    data = store.fingerprint
    return Evaluation(accuracy, ci95, tasks, store.dataset, split, data, subject, seed, execution, predictions)


ChunkPredictions = tuple[np.ndarray, np.ndarray]  # log-probabilities and labels of a chunk of tasks


def _predictions(prepared: Prepared, sample: Sample, progress: Progress | None, processes: Processes) -> Predictions:
    """Distributes chunks of tasks over the processes, not tasks: the last bit of a result depends on its chunk."""
    tasks = sample["tasks"]
    chunks = chunks_of(tasks, sample.get("tasks_per_chunk") or prepared.at_once)
    own = chunks[processes.rank :: processes.size]
    done: list[ChunkPredictions] = []
    problem = None
    try:
        for indices, predicted in zip(own, _predicted(prepared, own), strict=True):
            finite = np.isfinite(predicted[0].max(2)).all(1)  # (task,); a probability of exactly 0 is fine
            if not finite.all():
                task = indices[int(finite.argmin())]
                where = f"{sample['split']} task {task}"
                raise NotFiniteError(f"{where}: the prediction is not finite, so it has no accuracy")
            done.append(predicted)
            if progress:
                progress(indices.stop, tasks)
    except (TridentError, StoppedError) as error:
        if processes.alone:
            raise
        problem = error  # the others wait for this process: tell them
    everyone = processes.gather((done, problem))
    failed = [(len(chunks_done), rank) for rank, (chunks_done, error) in enumerate(everyone) if error is not None]
    if failed:
        earliest = everyone[min(failed)[1]][1]  # as in one process
        assert earliest is not None
        raise shared(earliest) if isinstance(earliest, TridentError) else earliest
    of_chunks = [everyone[place % processes.size][0][place // processes.size] for place in range(len(chunks))]
    return Predictions(*(np.concatenate(parts) for parts in zip(*of_chunks, strict=True)))


def _predicted(prepared: Prepared, chunks: list[range]) -> Iterator[ChunkPredictions]:
    """The predictions and labels of the queries, without the unlabelled images between them."""
    source = prepared.source

    def predicted(batch: Batch) -> ChunkPredictions:
        log_probabilities = prepared.log_probabilities(batch.task).double().cpu().numpy()
        labels = batch.labels.queries.cpu().numpy()
        counted = labels != UNLABELLED  # (task, image); as many in every task
        tasks, _, n_way = log_probabilities.shape
        return log_probabilities[counted].reshape(tasks, -1, n_way), labels[counted].reshape(tasks, -1)

    if prepared.in_parallel and not source.images.gathers:
        return parallel_map(lambda indices: predicted(source.batch(indices)), chunks, source.device)
    return map(predicted, source.prefetched(chunks))


def validate(
    recipe: Recipe,
    parameters: Parameters,
    running: Parameters,
    store: ImageStore,
    execution: Execution,
    progress: Progress,
    processes: Processes = ALONE,
) -> Evaluation:
    """Accuracy on validation tasks that no later measurement uses, on the engine of training if possible."""
    same = execution.engine == "plain" or why_not_fused(execution.device, recipe, execution.precision) is None
    own = recipe.training
    return evaluate(
        TrainedModel(recipe, parameters, running),
        store,
        progress=progress,
        processes=processes,
        stream="selection",
        split="val",
        tasks=own.validation_tasks,
        seed=own.seed,
        device=execution.device,
        engine=execution.engine if same else "plain",
        precision=execution.precision if same else "auto",
        tasks_per_chunk=own.tasks_per_chunk,
    )
