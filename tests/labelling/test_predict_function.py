"""Any function that predicts can be measured like trained weights, and sees no more than it should."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tiny import TINY_EPISODE, tiny_store
from trident.data.store import class_table, store_in_memory
from trident.errors import TridentError
from trident.measuring.audit import SORTED, audit
from trident.measuring.calibration import calibrate
from trident.measuring.evaluate import evaluate
from trident.measuring.subject import PredictFunction
from trident.settings import Protocol
from trident.tasks.episodes import EpisodeSampler, task_generator

TASKS = 6


def nearest_mean(support_images: np.ndarray, support_labels: np.ndarray, query_images: np.ndarray) -> np.ndarray:
    """A softmax of negative distances to the mean support images."""
    classes = range(support_labels.max() + 1)
    means = np.stack([support_images[support_labels == label].mean(0) for label in classes])
    distances = np.square((query_images[:, None] - means) / 255).sum((2, 3, 4))  # (query, class)
    odds = np.exp(distances.min(1, keepdims=True) - distances)
    return np.asarray(odds / odds.sum(1, keepdims=True))


def test_accuracy_is_what_one_computes_by_hand() -> None:
    store, hits = tiny_store(), []
    sampler = EpisodeSampler(store, "test", TINY_EPISODE, Protocol())
    for index in range(TASKS):
        episode = sampler.draw(task_generator(0, "test", index))
        said = nearest_mean(store.images[episode.support], episode.support_labels, store.images[episode.query])
        hits.append((said.argmax(1) == episode.query_labels).mean())
    subject = PredictFunction(nearest_mean, TINY_EPISODE)
    result = evaluate(subject, store, split="test", tasks=TASKS, seed=0)
    assert result.accuracy == pytest.approx(100 * np.mean(hits))
    assert result.predictions.accuracies.tolist() == pytest.approx((100 * np.array(hits)).tolist())
    told = result.describe_protocol()
    assert told == (
        "noise test, 3-way 2-shot, 2 queries per class, shuffled queries, balanced, function nearest_mean, "
        f"{TASKS} tasks, 95 % interval, seed 0"
    )
    assert result.to_json()["protocol"]["function"] == "nearest_mean"


def test_an_audit_has_the_rows_that_can_make_a_difference() -> None:
    result = audit(PredictFunction(nearest_mean, TINY_EPISODE), tiny_store(), split="test", tasks=TASKS, seed=0)
    assert [row.name for row in result.rows] == [
        "default",
        SORTED,
        "Dirichlet(2) class counts",
        "one query at a time",
    ]
    by_name = {row.name: row for row in result.rows}
    assert by_name[SORTED].difference == by_name["one query at a time"].difference == 0


def test_calibration_with_a_temperature() -> None:
    store, subject = tiny_store(), PredictFunction(nearest_mean, TINY_EPISODE)
    result = calibrate(subject, store, "validation", store, 4, split="test", tasks=TASKS, seed=0)
    probabilities = np.exp(result.evaluation.predictions.log_probabilities)
    truth = np.eye(3)[result.evaluation.predictions.labels]
    assert result.plain.brier == pytest.approx(np.square(probabilities - truth).sum(2).mean())
    assert result.scaled is not None
    assert result.scaled.fitted_tasks == "noise val, 4 tasks, seed 0"


def test_a_probability_of_zero_is_fine_and_torch_is_too() -> None:
    def certain(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.eye(3)[nearest_mean(support, labels, queries).argmax(1)])

    plain, sure = (
        evaluate(PredictFunction(function, TINY_EPISODE), tiny_store(), split="test", tasks=TASKS, seed=0)
        for function in (nearest_mean, certain)
    )
    assert sure.accuracy == plain.accuracy


def ragged(rows: np.ndarray) -> list[list[float]]:
    return [list(row[: 2 + place % 2]) for place, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda found: found[:, :2], ["shape (6, 2)", "(6, 3)"]),
        (lambda found: found[0], ["shape (3,)", "(6, 3)"]),
        (lambda found: None, ["(6, 3)"]),
        (ragged, ["(6, 3)"]),
        (lambda found: found.argmax(1), ["shape (6,)", "(6, 3)"]),
        (lambda found: found * np.nan, ["probabilities"]),
        (lambda found: 2 * found, ["probabilities"]),
        (lambda found: found + np.array([1, -1, 0]), ["probabilities"]),
        (np.log, ["probabilities"]),
    ],
)
def test_what_is_no_probability_is_told_in_one_line(spoil: Callable[[np.ndarray], Any], words: list[str]) -> None:
    def spoiled(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> Any:
        return spoil(nearest_mean(support, labels, queries))

    with pytest.raises(TridentError) as caught:
        evaluate(PredictFunction(spoiled, TINY_EPISODE), tiny_store(), split="test", tasks=2, seed=0)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    for word in ("spoiled", *words):
        assert word in said


def test_one_query_at_a_time() -> None:
    numbers: list[int] = []

    def counting(support: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
        assert len(support) == len(labels) == TINY_EPISODE.n_support
        numbers.append(len(queries))
        return nearest_mean(support, labels, queries)

    subject, one = PredictFunction(counting, TINY_EPISODE), Protocol(queries_at_once="one")
    together = evaluate(subject, tiny_store(), split="test", tasks=2, seed=0)
    assert numbers == [6, 6]
    numbers.clear()
    alone = evaluate(subject, tiny_store(), one, split="test", tasks=2, seed=0)
    assert numbers == [1] * 12
    assert "one query at a time" in alone.describe_protocol()
    np.testing.assert_allclose(alone.predictions.log_probabilities, together.predictions.log_probabilities)


def arrays_behind(given: object) -> list[np.ndarray]:
    """Every array that can be reached from an argument: what it is a view of, and so on."""
    found: list[np.ndarray] = []
    while given is not None:
        found.append(np.asarray(given))
        given = given.base if isinstance(given, np.ndarray) else getattr(given, "_base", None)
    return found


@pytest.mark.parametrize("at_once", ["all", "one"])
def test_query_labels_are_out_of_sight(at_once: Any) -> None:
    """No array that the function gets leads to as many whole numbers as there are queries."""
    sampler = EpisodeSampler(tiny_store(), "test", TINY_EPISODE, Protocol())
    truth = sampler.draw(task_generator(0, "test", 0)).query_labels
    labels_seen: list[np.ndarray] = []

    def looking(*given: np.ndarray) -> np.ndarray:
        assert len(given) == 3
        images, labels, queries = given
        assert images.dtype.name == queries.dtype.name == "uint8"
        assert labels.tolist() == [0, 0, 1, 1, 2, 2]
        behind = [array for argument in given for array in arrays_behind(argument)]
        labels_seen.extend(array for array in behind if array.dtype.name != "uint8")
        return nearest_mean(images, labels, queries)

    protocol = Protocol(queries_at_once=at_once)
    evaluate(PredictFunction(looking, TINY_EPISODE, protocol), tiny_store(), split="test", tasks=1, seed=0)
    assert labels_seen
    for array in labels_seen:
        assert set(map(tuple, array.reshape(-1, TINY_EPISODE.n_support).tolist())) == {(0, 0, 1, 1, 2, 2)}
    assert sorted(truth.tolist()) == [0, 0, 1, 1, 2, 2] and truth.tolist() != sorted(truth.tolist())


@pytest.mark.parametrize(
    "at_once",
    ["all", "one"],
)
def test_a_function_that_writes_into_its_arguments_changes_nothing(at_once: Any) -> None:
    def careless(images: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> np.ndarray:
        found = nearest_mean(images, labels, queries)
        for given in (images, labels, queries):
            given[:] = 0
        return found

    store, protocol = tiny_store(), Protocol(queries_at_once=at_once)
    results = [
        evaluate(PredictFunction(function, TINY_EPISODE, protocol), store, split="test", tasks=2, seed=0)
        for function in (nearest_mean, careless)
    ]
    first, second = (result.predictions for result in results)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(first.log_probabilities, second.log_probabilities)


def test_several_tasks_at_once_are_as_one_after_the_other() -> None:
    store, sample = tiny_store(), {"split": "test", "tasks": 4, "seed": 0}
    for at_once in ("all", "one"):
        model = PredictFunction(nearest_mean, TINY_EPISODE, replace(Protocol(), queries_at_once=at_once))
        apart = evaluate(model, store, **sample)  # type: ignore[arg-type]
        together = evaluate(model, store, tasks_per_chunk=4, **sample)  # type: ignore[arg-type]
        assert np.array_equal(apart.predictions.log_probabilities, together.predictions.log_probabilities)


def test_a_temperature_is_never_fitted_on_the_tasks_that_are_scored() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10 * 8, 16, 16, 1)).astype(np.uint8)  # nothing to be sure of
    classes = class_table((f"{split} {i}", split, 8) for split in ("val", "test") for i in range(5))
    store, model = store_in_memory("noise", images, classes), PredictFunction(nearest_mean, TINY_EPISODE)
    result = calibrate(model, store, "validation", store, fitting_tasks=8, split="val", tasks=8, seed=0)
    leaked = calibrate(model, store, "paper", split="val", tasks=8, seed=0)
    assert result.scaled is not None and leaked.scaled is not None
    assert result.scaled.temperature != leaked.scaled.temperature
