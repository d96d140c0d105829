"""Properties every drawn task has, whatever its shape."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import TINY_RECIPE, source_for, tiny_store
from trident.data.glyphs import open_glyphs
from trident.data.store import class_table, store_in_memory
from trident.errors import TridentError
from trident.learning.checkpoint import Checkpoint
from trident.measuring.evaluate import evaluate
from trident.methods.metric.protonet import ProtoNet
from trident.settings import EpisodeSpec, Protocol
from trident.tasks.episodes import UNLABELLED, EpisodeSampler, _share_out, task_generator
from trident.tasks.source import ClassSource

STORE = store_in_memory(
    "blank",
    np.zeros((30 * 40, 2, 2, 1), np.uint8),
    class_table((f"class {i}", "train" if i < 15 else "test", 40) for i in range(30)),
)


@settings(max_examples=60)
@given(
    n_way=st.integers(1, 15),
    n_shot=st.integers(1, 20),
    n_query=st.integers(1, 20),
    order=st.sampled_from(["shuffled", "class_sorted"]),
    balance=st.sampled_from(["balanced", "dirichlet"]),
    alpha=st.floats(0.01, 20),
    seed=st.integers(0, 2**32),
)
def test_every_task_is_well_formed(
    n_way: int, n_shot: int, n_query: int, order: str, balance: str, alpha: float, seed: int
) -> None:
    spec = EpisodeSpec(n_way, n_shot, n_query)
    protocol = Protocol(query_order=order, balance=balance, dirichlet_alpha=alpha)  # type: ignore[arg-type]
    episode = EpisodeSampler(STORE, "test", spec, protocol).draw(task_generator(seed, "test", 0))
    assert len(episode.support) == n_way * n_shot
    assert len(episode.query) == n_way * n_query
    places = np.concatenate([episode.support, episode.query])
    assert len(set(places.tolist())) == len(places), "support and query overlap, or an image came twice"
    assert places.min() >= 15 * 40, "an image of another split"
    labels = np.concatenate([episode.support_labels, episode.query_labels])
    pairs = set(zip((places // 40).tolist(), labels.tolist(), strict=True))
    assert len(pairs) == n_way, "a class with two labels, or a label with two classes"
    assert Counter(episode.support_labels.tolist()) == dict.fromkeys(range(n_way), n_shot)
    if balance == "balanced":
        assert Counter(episode.query_labels.tolist()) == dict.fromkeys(range(n_way), n_query)
    if order == "class_sorted":
        assert (np.diff(episode.query_labels) >= 0).all()


@given(
    total=st.integers(0, 60),
    proportions=st.lists(st.floats(0.01, 1), min_size=2, max_size=6),
    spare=st.integers(0, 30),
)
def test_shares_sum_to_the_total_and_fit(total: int, proportions: list[float], spare: int) -> None:
    room = [total // len(proportions) + 1 + spare] * len(proportions)
    counts = _share_out(total, np.array(proportions) / sum(proportions), room)
    assert sum(counts) == total
    assert all(0 <= count <= place for count, place in zip(counts, room, strict=True))


GOLDEN_SUPPORT = [6171, 13697, 20101, 15809, 14954]
GOLDEN_QUERY = [14949, 15810, 20111, 6164, 13685]


def sampler(order: str = "shuffled") -> EpisodeSampler:
    return EpisodeSampler(open_glyphs(), "train", EpisodeSpec(5, 1, 5), Protocol(query_order=order))  # type: ignore[arg-type]


def test_golden_task() -> None:
    """The very places drawn for one seed: a change here changes every published number."""
    episode = sampler().draw(task_generator(0, "test", 7))
    assert episode.support.tolist() == GOLDEN_SUPPORT
    assert episode.query[:5].tolist() == GOLDEN_QUERY


def test_both_query_orders_hold_the_same_images() -> None:
    shuffled = sampler().draw(task_generator(0, "test", 3))
    in_order = sampler("class_sorted").draw(task_generator(0, "test", 3))
    assert shuffled.support.tolist() == in_order.support.tolist()
    assert sorted(zip(shuffled.query, shuffled.query_labels, strict=True)) == sorted(
        zip(in_order.query, in_order.query_labels, strict=True)
    )
    assert shuffled.query_labels.tolist() != in_order.query_labels.tolist()


def test_shuffled_positions_say_nothing_about_the_class() -> None:
    """Over many tasks every class stands in the first place about equally often."""
    first = Counter(int(sampler().draw(task_generator(0, "train", i)).query_labels[0]) for i in range(1000))
    assert all(150 <= first[label] <= 250 for label in range(5))


def test_tasks_and_noise_do_not_depend_on_the_chunk() -> None:
    source = source_for(TINY_RECIPE, tiny_store())
    together = source.batch(range(4))
    apart = source.batch([2])
    assert torch.equal(together.task.pixels[2:3], apart.task.pixels)
    assert torch.equal(together.task.support_labels[2:3], apart.task.support_labels)
    assert torch.equal(together.labels.queries[2:3], apart.labels.queries)
    assert together.task.noise.keys() == apart.task.noise.keys() >= {"query/0/label", "support/1/semantic"}
    for name, values in together.task.noise.items():
        assert torch.equal(values[2:3], apart.task.noise[name])


def test_latent_means_need_no_noise() -> None:
    task = source_for(TINY_RECIPE, tiny_store(), sampled=False).batch([0]).task
    assert len(task.noise) == 6  # two inner steps and the queries, for each latent
    assert all(not values.any() for values in task.noise.values())


def test_batches_of_all_classes_are_of_training_images_and_do_not_depend_on_the_chunk() -> None:
    store = tiny_store()
    source = ClassSource(store, 12, seed=3)
    together, apart = source.batch([4, 5]), source.batch([5])
    assert torch.equal(together.task.images[1:], apart.task.images)
    assert torch.equal(together.labels.queries[1:], apart.labels.queries)
    task, labels = apart
    assert (task.n_tasks, task.n_support, task.n_queries, task.n_way) == (1, 0, 12, 5)
    assert labels.training_classes is not None and torch.equal(labels.queries, labels.training_classes)
    found = [(store.images == image).all((1, 2, 3)).nonzero()[0].tolist() for image in task.images[0].numpy()]
    assert all(len(places) == 1 for places in found)
    assert len({places[0] for places in found}) == 12, "an image came twice"
    assert [places[0] // 8 for places in found] == labels.queries[0].tolist()
    everything = ClassSource(store, 1000, seed=0).batch([0])
    assert everything.task.n_queries == 5 * 8


def test_dirichlet_counts_vary() -> None:
    spec, protocol = EpisodeSpec(5, 1, 5), Protocol(balance="dirichlet")
    drawn = EpisodeSampler(STORE, "test", spec, protocol)
    counts = {tuple(np.bincount(drawn.draw(task_generator(0, "test", i)).query_labels, minlength=5)) for i in range(20)}
    assert len(counts) > 15


def test_tasks_are_whole_even_if_shares_are_zero() -> None:
    """Small alphas give shares so small that they are rounded to zero."""
    drawn = EpisodeSampler(STORE, "test", EpisodeSpec(5, 1, 15), Protocol(balance="dirichlet", dirichlet_alpha=0.01))
    for index in range(300):
        assert len(set(drawn.draw(task_generator(0, "test", index)).query.tolist())) == 75


def test_any_label_may_be_that_of_the_absent_class() -> None:
    drawn = EpisodeSampler(STORE, "test", EpisodeSpec(5, 1, 5), Protocol(balance="one_absent"))
    queries = [drawn.draw(task_generator(0, "test", i)).query_labels for i in range(40)]
    counts = np.array([np.bincount(labels, minlength=5) for labels in queries])  # (task, class)
    assert (counts.sum(1) == 25).all() and ((counts == 0).sum(1) == 1).all()
    assert set(counts.argmin(1)) == set(range(5))


@pytest.mark.parametrize(
    ("spec", "split", "words"),
    [
        (EpisodeSpec(5, 1, 40), "test", ["class", "has 40 images", "41 are needed"]),
        (EpisodeSpec(16, 1, 1), "test", ["15 test classes", "16-way"]),
        (EpisodeSpec(), "val", ["no classes in split 'val'", "test, train"]),
    ],
)
def test_impossible_tasks_are_refused_in_words(spec: EpisodeSpec, split: str, words: list[str]) -> None:
    with pytest.raises(TridentError) as caught:
        EpisodeSampler(STORE, split, spec, Protocol())
    assert all(word in str(caught.value) for word in words)


UNLABELLED_SPEC = EpisodeSpec(4, 2, 3, n_unlabelled=5, distractors=2)


@pytest.mark.parametrize("order", ["shuffled", "class_sorted"])
@pytest.mark.parametrize("balance", ["balanced", "dirichlet"])
def test_unlabelled_images_come_beside_the_same_queries(order: str, balance: str) -> None:
    protocol = Protocol(query_order=order, balance=balance)  # type: ignore[arg-type]
    plain = EpisodeSampler(STORE, "test", EpisodeSpec(4, 2, 3), protocol).draw(task_generator(0, "test", 7))
    found = EpisodeSampler(STORE, "test", UNLABELLED_SPEC, protocol).draw(task_generator(0, "test", 7))
    np.testing.assert_array_equal(found.support, plain.support)
    counted = found.query_labels != UNLABELLED
    pairs = [set(zip(e.query.tolist(), e.query_labels.tolist(), strict=True)) for e in (plain, found)]
    assert pairs[0] == {pair for pair in pairs[1] if pair[1] != UNLABELLED} and counted.sum() == 12
    assert len(found.query) == UNLABELLED_SPEC.n_queries == 12 + 6 * 5
    assert len({*found.support.tolist(), *found.query.tolist()}) == 8 + 42  # no image comes twice
    per_class = Counter((found.query[~counted] // 40 - 15).tolist())
    assert set(per_class.values()) == {5} and len(per_class) == 6 and set(plain.classes) < set(per_class)
    if order == "class_sorted":
        np.testing.assert_array_equal(found.query[:12], plain.query)
    else:
        assert counted[:12].sum() < 12  # mixed


def test_answers_on_unlabelled_images_do_not_count() -> None:
    """A method that classifies each image alone has the very same accuracies with and without them."""
    recipe = replace(TINY_RECIPE, method=ProtoNet(), protocol=Protocol(batch_norm="running"))
    accuracies = []
    for spec in (EpisodeSpec(3, 1, 4), EpisodeSpec(3, 1, 4, n_unlabelled=2, distractors=1)):
        given = replace(recipe, episode=spec)
        model = Checkpoint(given, given.initial(0), given.model.initial_running(), 0)
        accuracies.append(evaluate(model, tiny_store(), split="train", tasks=6, seed=0).predictions.accuracies)
    np.testing.assert_array_equal(accuracies[0], accuracies[1])


def test_impossible_unlabelled_images_are_refused_in_words() -> None:
    with pytest.raises(TridentError, match=r"distractors is 2: it needs episode.n_unlabelled"):
        EpisodeSpec(distractors=2)
    with pytest.raises(TridentError, match="15 test classes, too few for 14-way tasks with 2 distractors"):
        EpisodeSampler(STORE, "test", EpisodeSpec(14, 1, 1, 1, 2), Protocol())
    with pytest.raises(TridentError, match=r"5 queries and 40 unlabelled images: 46 are needed"):
        EpisodeSampler(STORE, "test", EpisodeSpec(2, 1, 5, 40), Protocol())
    with pytest.raises(TridentError, match=r"a query that is alone has no unlabelled images"):
        EpisodeSampler(STORE, "test", EpisodeSpec(2, 1, 5, 3), Protocol(queries_at_once="one"))
