"""Chunks of tasks on several cores: the same results in the same order, and no trace left behind."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tiny import TINY_RECIPE, tiny_store
from trident.engines.workers import parallel_map
from trident.learning.checkpoint import Checkpoint
from trident.measuring.evaluate import evaluate


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_from_several_threads() -> None:
    met = threading.Barrier(2, timeout=20)

    def work(item: int) -> tuple[int, int, str]:
        if item < 2:
            met.wait()  # both of the first two are under way at once, or this never ends
        return item, torch.get_num_threads(), threading.current_thread().name

    results = list(parallel_map(work, range(6), "cpu"))
    assert [item for item, _, _ in results] == list(range(6))
    assert {threads for _, threads, _ in results} == {1}
    assert len({name for _, _, name in results}) == 2
    assert torch.get_num_threads() == 2


def test_errors_and_early_ends_leave_nothing_behind() -> None:
    done: list[int] = []
    before = set(threading.enumerate())

    def work(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="three"):
        list(parallel_map(work, range(1000), "cpu"))
    assert len(done) < 1000
    assert torch.get_num_threads() == 2
    for first in parallel_map(lambda item: item, range(5), "cpu"):
        assert first == 0
        break
    assert torch.get_num_threads() == 2
    later = set(threading.enumerate()) - before
    assert not [thread for thread in later if thread.name.startswith("trident-core")]


def test_two_at_once_leave_each_thread_its_cores() -> None:
    """The second begins in a new thread while the first is at work, and ends after it."""
    first_works, second_works, first_done = (threading.Event() for _ in range(3))
    cores: dict[str, tuple[set[int], int]] = {}

    def one(name: str, mine: threading.Event, other: threading.Event) -> None:
        def work(_: int) -> int:
            mine.set()
            assert other.wait(20)
            return torch.get_num_threads()

        cores[name] = set(parallel_map(work, range(4), "cpu")), torch.get_num_threads()

    first = threading.Thread(target=one, args=("first", first_works, second_works))
    second = threading.Thread(target=one, args=("second", second_works, first_done))
    first.start()
    assert first_works.wait(20)
    second.start()
    first.join()
    first_done.set()
    second.join()
    later = threading.Thread(target=lambda: cores.update(later=(set(), torch.get_num_threads())))
    later.start()
    later.join()
    assert cores == {"first": ({1}, 2), "second": ({1}, 2), "later": (set(), 2)}


@pytest.mark.parametrize("no_gradients", [False, True])
def test_evaluation_does_not_depend_on_cores_or_chunks(no_gradients: bool) -> None:
    checkpoint = Checkpoint(TINY_RECIPE, TINY_RECIPE.initial(0), TINY_RECIPE.model.initial_running(), step=0)
    store = tiny_store()
    found = []
    for cores, at_once in ((1, None), (2, None), (2, 1), (2, 3)):
        torch.set_num_threads(cores)
        with torch.set_grad_enabled(not no_gradients):
            result = evaluate(checkpoint, store, split="test", tasks=4, seed=0, tasks_per_chunk=at_once)
        found.append(result.predictions.log_probabilities)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)
