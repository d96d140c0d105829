"""Labelling by features: the whole pile together, in any order, with pictures that belong nowhere or cannot be read."""

import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_up_latents import made_up_latents
from stand_in_backbone import COLOURS, NAME, made_up, picture, save_pictures
from trident.backbones.pretrained import BATCH, Pretrained, find_backbone
from trident.data.images import ImageFile, ImageInMemory, UnreadableImageError, key_of
from trident.errors import BadValueError, TridentError
from trident.labelling import feature_labeller, picture_features
from trident.labelling.feature_cache import FeatureCache
from trident.labelling.feature_labeller import ENOUGH_TOGETHER, FeatureLabeller
from trident.labelling.label_latents import LabelLatents, latents_for
from trident.labelling.making import make_labeller
from trident.labelling.picture_features import features_of
from trident.labelling.suggesting import suggest
from trident.labelling.typicality import LEAST_TYPICAL, normalised, typicality
from trident.methods.evidence import heads
from trident.methods.trident.features import TRAINING_MEAN

LITE0 = "efficientnet-lite0"
SIZE = 64  # of made-up features
with_latents = pytest.mark.parametrize("latents", [None, made_up_latents(SIZE)], ids=["features", "latents"])


@pytest.fixture(scope="module")
def backbone() -> Pretrained:
    return find_backbone(NAME)


def split_up(
    backbone: Pretrained,
    features: np.ndarray,
    labels: np.ndarray,
    shots: list[int],
    latents: LabelLatents | None = None,
) -> tuple[FeatureLabeller, np.ndarray, np.ndarray]:
    """The first pictures of each class are labelled ones, the others the pile."""
    known = np.concatenate([np.flatnonzero(labels == c)[:n] for c, n in enumerate(shots)])
    rest = np.setdiff1d(np.arange(len(labels)), known)
    classes = tuple(f"class {c}" for c in range(len(shots)))
    return FeatureLabeller(backbone, classes, features[known], labels[known], latents), features[rest], labels[rest]


def test_latents_are_weighed_beside_features(backbone: Pretrained) -> None:
    labeller, pile, _ = split_up(backbone, *made_up(4, 30, spread=1.6), [2, 2, 3, 4], made_up_latents(SIZE))
    plain = replace(labeller, latents=None)
    before = normalised(pile)
    for together in (True, False):
        weights = labeller.judge(before, together).weights
        of_latents = {name.removesuffix(" 2"): weight for name, weight in weights.items() if name.endswith(" 2")}
        assert of_latents.keys() == plain.judge(before, together).weights.keys()
        assert sum(weights.values()) == pytest.approx(1) and 0 < sum(of_latents.values()) < 1
    np.testing.assert_array_equal(before, normalised(pile))  # only copies are overwritten
    assert "label latents" in labeller.describe() and "label latents" not in plain.describe()


def test_with_one_label_each_latents_alone_count(backbone: Pretrained) -> None:
    labeller, pile, _ = split_up(backbone, *made_up(4, 30, spread=1.6), [1, 1, 1, 1], made_up_latents(SIZE))
    weights = labeller.judge(normalised(pile), True).weights
    assert weights["soft-kmeans-8 2"] == 1 == sum(weights.values())
    assert labeller.label_features(pile).expected is None


def test_the_expected_accuracy_is_about_right(backbone: Pretrained) -> None:
    """Over 12 piles of middling difficulty: on average within 4 points, and inside nearly all intervals."""
    errors, inside = [], []
    for seed in range(12):
        features, labels = made_up(5, 40, spread=1.4, seed=seed)
        labeller, pile, truth = split_up(backbone, features, labels, [5] * 5)
        found = labeller.label_features(pile)
        assert found.expected is not None and found.expected.n_left_out == 25
        right = (found.probabilities.argmax(1) == truth).mean()
        errors.append(found.expected.share - right)
        inside.append(found.expected.low <= right <= found.expected.high)
    assert abs(np.mean(errors)) < 0.04
    assert sum(inside) >= 10


def test_pictures_unlike_those_of_training_are_compared_by_their_features(backbone: Pretrained) -> None:
    labeller, pile, _ = split_up(
        backbone, *made_up(4, 30, spread=1.6), [1, 2, 3, 4], made_up_latents(SIZE, trust_from=50.0)
    )
    found, plain = (one.label_features(pile).probabilities for one in (labeller, replace(labeller, latents=None)))
    np.testing.assert_array_equal(found, plain)


@with_latents
def test_many_labelled_pictures_need_no_kernel(
    backbone: Pretrained, latents: LabelLatents | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    labeller, pile, labels = split_up(backbone, *made_up(3, 30, spread=0.5), [5, 5, 5], latents)
    regression = labeller.label_features(pile, together=False).probabilities
    monkeypatch.setattr(heads, "MOST_FOR_KERNEL", 11)
    means = labeller.label_features(pile, together=False).probabilities
    assert (means.argmax(1) == labels).mean() > 0.95
    assert np.abs(means - regression).max() > 1e-4


def test_the_trained_latents_are_for_features_of_their_own_backbone() -> None:
    latents = latents_for(LITE0)
    assert latents is not None
    assert latents.method.mask_from == "support"
    assert latents.parameters[TRAINING_MEAN].norm() > 0.1
    assert latents_for("efficientnet-lite2") is None
    assert latents_for(NAME) is None


@with_latents
def test_the_order_of_the_pile_does_not_matter(backbone: Pretrained, latents: LabelLatents | None) -> None:
    """Bit by bit: not even by rounding. The pile is a hard one, with pictures that belong to no class."""
    labeller, pile, _ = split_up(backbone, *made_up(6, 60, spread=1.6), [1, 2, 3, 4, 5, 6], latents)
    pile = np.concatenate([pile, -pile[:9]])
    found = labeller.label_features(pile)
    assert found.typicality is not None
    assert 9 <= sum(map(found.belongs_to_none, range(len(pile)))) < len(pile) / 2
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(pile))
        other = labeller.label_features(pile[order])
        assert other.typicality is not None
        np.testing.assert_array_equal(other.typicality, found.typicality[order])
        np.testing.assert_array_equal(other.probabilities, found.probabilities[order])


def test_the_order_of_files_does_not_matter(tmp_path: Path, backbone: Pretrained) -> None:
    save_pictures(tmp_path, dict.fromkeys(COLOURS, 9))
    files = [ImageFile(path) for path in sorted(tmp_path.iterdir())]
    by_class = {name: [ImageInMemory(name, picture(name, 77))] for name in COLOURS}
    labeller = make_labeller(by_class, NAME)
    order = np.random.default_rng(0).permutation(len(files))
    one, other = labeller.label(files), labeller.label([files[place] for place in order])
    np.testing.assert_array_equal(one.probabilities[order], other.probabilities)
    assert [one.ranking(place)[0][0] for place in range(len(files))] == [f.file.name.split("-")[0] for f in files]


def test_many_classes_and_unequal_shots_are_refined_together(backbone: Pretrained) -> None:
    shots = [1 + c % 7 for c in range(40)]
    labeller, pile, labels = split_up(backbone, *made_up(40, 30, 128, spread=1.3), shots)
    together, alone = (labeller.label_features(pile, together=how).probabilities for how in (True, False))
    np.testing.assert_allclose(together.sum(1), 1)
    accuracy, accuracy_alone = ((found.argmax(1) == labels).mean() for found in (together, alone))
    assert accuracy > 0.9
    assert accuracy > accuracy_alone + 0.2


@with_latents
def test_alone_means_alone(backbone: Pretrained, latents: LabelLatents | None) -> None:
    labeller, pile, _ = split_up(backbone, *made_up(5, 30, spread=1.2), [2, 2, 2, 2, 3], latents)
    pile = np.concatenate([pile, -pile[:5]])
    found = labeller.label_features(pile, together=False)
    assert found.typicality is not None
    for places in ([3], [len(pile) - 1], [10, 2, 7], range(0, len(pile), 2)):
        some = labeller.label_features(pile[list(places)], together=False)
        assert some.typicality is not None
        np.testing.assert_allclose(some.probabilities, found.probabilities[list(places)], rtol=0, atol=1e-12)
        np.testing.assert_allclose(some.typicality, found.typicality[list(places)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_labelled", [[1, 1], [4, 1], [3, 3], [4, 3], [20, 21]])
def test_typicality_alone_is_that_of_a_pile_of_one(n_labelled: list[int]) -> None:
    features, labels = made_up(2, n_labelled, 8, spread=2.0)
    pile = normalised(np.concatenate([made_up(2, 10, 8, spread=2.0, seed=1)[0], -features[:1]]))
    each = [typicality(normalised(features), labels, pile[place : place + 1], 2) for place in range(len(pile))]
    found = typicality(normalised(features), labels, pile, 2, together=False)
    if found is None:
        assert each == [None] * len(pile)
        return
    np.testing.assert_allclose(found, np.concatenate([one for one in each if one is not None]), atol=1e-12)


def test_small_piles_are_labelled_each_alone(backbone: Pretrained) -> None:
    labeller, pile, _ = split_up(backbone, *made_up(4, 30), [2, 2, 2, 2])
    least = ENOUGH_TOGETHER * 4
    enough = np.random.default_rng(0).permutation(pile)[:least]
    few = enough[:-1]
    alone = labeller.label_features(enough, together=False).probabilities
    np.testing.assert_allclose(labeller.label_features(few).probabilities, alone[:-1], atol=1e-12)
    assert not np.allclose(labeller.label_features(enough).probabilities, alone, atol=1e-6)
    junk = np.concatenate([few, -few[:1]])  # a picture that belongs nowhere does not count
    np.testing.assert_allclose(labeller.label_features(junk).probabilities[:-1], alone[:-1], atol=1e-12)
    assert labeller.label_features(pile[:0]).probabilities.shape == (0, 4)


def test_what_belongs_to_none_is_marked_and_members_are_not(backbone: Pretrained) -> None:
    labeller, pile, labels = split_up(backbone, *made_up(6, 50, spread=0.5), [3] * 6)
    junk = np.random.default_rng(1).normal(size=(40, pile.shape[1])).astype(np.float32)
    found = labeller.label_features(np.concatenate([pile, junk]))
    marked = np.array([found.belongs_to_none(place) for place in range(len(pile) + 40)])
    assert marked[len(pile) :].mean() > 0.95
    assert marked[: len(pile)].mean() < 0.02
    assert (found.probabilities[: len(pile)].argmax(1) == labels).mean() > 0.99
    np.testing.assert_allclose(found.probabilities.sum(1), 1)  # they have a best guess all the same


def test_what_belongs_to_none_does_not_move_the_others(backbone: Pretrained) -> None:
    """All labels stay the same to the last bit, however much junk there is: half as much as there are pictures."""
    labeller, pile, _ = split_up(backbone, *made_up(4, 40, spread=0.8), [2] * 4)
    clean = labeller.label_features(pile)
    assert not any(map(clean.belongs_to_none, range(len(pile))))
    junk = -np.abs(made_up(1, len(pile) // 2, spread=0.2, seed=9)[0])
    mixed = labeller.label_features(np.concatenate([junk, pile]))
    assert all(map(mixed.belongs_to_none, range(len(junk))))
    np.testing.assert_array_equal(mixed.probabilities[len(junk) :], clean.probabilities)


def test_few_pictures_are_not_judged(backbone: Pretrained) -> None:
    features, labels = made_up(2, 5)
    labeller, pile, _ = split_up(backbone, features, labels, [1, 1])
    assert labeller.label_features(pile[:4]).typicality is None  # one labelled picture of a class says nothing
    found = labeller.label_features(pile[:5])
    assert found.typicality is not None and found.least_typical == LEAST_TYPICAL
    assert labeller.label_features(pile[:4]).belongs_to_none(0) is False


@pytest.mark.parametrize("with_cache", [False, True])
def test_unreadable_pictures_are_reported_and_the_rest_labelled(
    tmp_path: Path, backbone: Pretrained, with_cache: bool
) -> None:
    save_pictures(tmp_path, dict.fromkeys(COLOURS, 8))
    (tmp_path / "aaa.png").write_bytes(b"no picture")
    (tmp_path / "zzz.png").write_bytes((tmp_path / "red-000.png").read_bytes()[:60])
    files = [ImageFile(path) for path in sorted(tmp_path.glob("*.png"))] + [ImageFile(tmp_path / "gone.png")]
    cache = FeatureCache(tmp_path / "cache") if with_cache else None
    by_class = {name: [ImageInMemory(name, picture(name, 77))] for name in COLOURS}
    labeller = make_labeller(by_class, NAME, cache=cache)
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        found = labeller.label(files, lambda done, total: seen.append((done, total)))
        assert list(found.failures) == [0, len(files) - 2, len(files) - 1]
        assert "aaa.png: it is not an image" in found.failures[0]
        assert "gone.png: No such file" in found.failures[len(files) - 1]
        assert np.isnan(found.probabilities[[0, -2, -1]]).all()
        readable = files[1:-2]
        assert [found.ranking(place)[0][0] for place in range(1, len(files) - 2)] == [
            file.file.name.split("-")[0] for file in readable
        ]
        np.testing.assert_array_equal(found.probabilities[1:-2], labeller.label(readable).probabilities)
    assert seen[-1] == (len(files), len(files))
    assert [done for done, _ in seen[: len(seen) // 2]] == sorted(done for done, _ in seen[: len(seen) // 2])
    nothing = labeller.label([files[0], files[-1]])
    assert np.isnan(nothing.probabilities).all() and len(nothing.failures) == 2
    with pytest.raises(UnreadableImageError, match=r"aaa\.png"):
        make_labeller(by_class | {"broken": [files[0]]}, NAME)


def test_features_come_in_batches_and_from_the_cache(
    tmp_path: Path, backbone: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pictures(tmp_path, {"red": 20, "blue": 20})
    files = [ImageFile(path) for path in sorted(tmp_path.glob("*.png"))]
    batches: list[int] = []

    def counting(pixels: np.ndarray) -> np.ndarray:
        batches.append(len(pixels))
        return backbone.compute(pixels)

    watched = replace(backbone, compute=counting)
    monkeypatch.setattr(picture_features, "_CACHE_AT_ONCE", 24)
    cache = FeatureCache(tmp_path / "cache")
    first, _ = features_of(watched, files, cache)
    assert batches == [BATCH] * 3  # 16, 8 and 16 pictures: batches are always full
    assert cache.size()[0] == len(files)
    again, _ = features_of(watched, files[::-1], cache)
    assert len(batches) == 3
    np.testing.assert_array_equal(again[::-1], first)
    np.testing.assert_array_equal(features_of(backbone, files, None)[0], first)
    other = replace(watched, fingerprint="1" * 64)
    features_of(other, files[:3], cache)
    assert len(batches) == 4  # another network's features are not taken for its own


def test_a_picture_that_changes_during_a_run_does_not_poison_the_cache(tmp_path: Path, backbone: Pretrained) -> None:
    save_pictures(tmp_path, {"red": 1, "blue": 1})
    red, blue = ((tmp_path / f"{name}-000.png").read_bytes() for name in ("red", "blue"))
    file = ImageFile(tmp_path / "a.png")
    file.file.write_bytes(red)
    (of_red,) = features_of(backbone, [file], None)[0]

    class Changing(FeatureCache):
        def get(self, *arguments: Any) -> dict[bytes, np.ndarray]:
            file.file.write_bytes(blue)  # after the picture was hashed, and before it is decoded
            return super().get(*arguments)

    (of_blue,) = features_of(backbone, [file], Changing(tmp_path / "cache"))[0]
    assert not np.array_equal(of_red, of_blue)
    assert FeatureCache(tmp_path / "cache").get(backbone.fingerprint, [key_of(blue)], len(of_blue)).keys()
    file.file.write_bytes(red)
    np.testing.assert_array_equal(features_of(backbone, [file], FeatureCache(tmp_path / "cache"))[0][0], of_red)


def test_twenty_thousand_pictures(backbone: Pretrained) -> None:
    """In seconds, and without many copies of the features: they have 51 MB here."""
    features, labels = made_up(20, 1005, 640, spread=1.5)
    labeller, pile, truth = split_up(backbone, features, labels, [5] * 20)
    assert len(pile) == 20_000
    tracemalloc.start()  # sees the memory of numpy, not that of torch
    start = time.process_time()
    found = labeller.label_features(pile)
    assert time.process_time() - start < 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * pile.nbytes
    assert (found.probabilities.argmax(1) == truth).mean() > 0.99


def test_alone_is_fast_with_many_labelled_pictures(backbone: Pretrained) -> None:
    features, labels = made_up(50, 60, 256)
    labeller, pile, truth = split_up(backbone, features, labels, [40] * 50)
    start = time.process_time()
    found = labeller.label_features(pile, together=False)
    assert time.process_time() - start < 2
    assert (found.probabilities.argmax(1) == truth).mean() > 0.99


def test_more_labelled_pictures_and_new_classes(tmp_path: Path) -> None:
    labeller = make_labeller({name: [ImageInMemory(name, picture(name, 5))] for name in ("red", "blue")}, NAME)
    assert isinstance(labeller, FeatureLabeller)
    more = labeller.with_pictures(
        {
            "green": [ImageInMemory("x", picture("green", place)) for place in range(2)],
            "red": [ImageInMemory("y", picture("red", 8))],
        }
    )
    assert more.classes == ("red", "blue", "green")
    assert more.labels.tolist() == [0, 1, 2, 2, 0]
    assert more.label([ImageInMemory("z", picture("green", 50))]).ranking(0)[0][0] == "green"
    assert labeller.with_pictures({}) is labeller
    assert labeller.classes == ("red", "blue")
    np.testing.assert_array_equal(more.unit_features[:2], labeller.unit_features)


def test_bad_labelled_pictures(backbone: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = made_up(2, 3)
    with pytest.raises(BadValueError, match="one class only, 'a'"):
        FeatureLabeller(backbone, ("a",), features[:3], labels[:3])
    with pytest.raises(TridentError, match="class 'b' has no labelled picture"):
        FeatureLabeller(backbone, ("a", "b"), features[:3], labels[:3])
    monkeypatch.setattr(feature_labeller, "MOST_LABELLED", 5)
    with pytest.raises(BadValueError, match="there are 6 labelled pictures: 5 at most"):
        FeatureLabeller(backbone, ("a", "b"), features, labels)


# What to label next


def test_suggestions_are_uncertain_and_different_from_each_other(backbone: Pretrained) -> None:
    """Between two of four classes lie two tight groups of doubtful pictures: one of each group is suggested first."""
    features, labels = made_up(4, 31, spread=0.1)
    labeller, pile, _ = split_up(backbone, features, labels, [1] * 4)
    between = [features[labels == a][:8] + features[labels == b][:8] for a, b in ((0, 1), (2, 3))]
    pile = normalised(np.concatenate([pile, *between]))
    found = labeller.label_features(pile)
    chosen = suggest(labeller.unit_features, pile, found, 10)
    assert len(set(chosen)) == 10
    groups = [range(120, 128), range(128, 136)]
    assert {next(place for place, group in enumerate(groups) if one in group) for one in chosen[:2]} == {0, 1}
    assert suggest(labeller.unit_features, pile, found, 3) == chosen[:3]
    assert len(suggest(labeller.unit_features, pile[:4], labeller.label_features(pile[:4]), 10)) == 4
    assert suggest(labeller.unit_features, pile[:0], labeller.label_features(pile[:0]), 10) == []


def test_pictures_of_no_class_are_not_suggested(backbone: Pretrained) -> None:
    features, labels = made_up(4, 31, spread=0.1)
    labeller, pile, _ = split_up(backbone, features, labels, [1] * 4)
    strangers = np.random.default_rng(0).standard_normal((8, pile.shape[1])).astype(np.float32)
    pile = normalised(np.concatenate([pile, strangers]))
    found = labeller.label_features(pile)
    assert all(found.belongs_to_none(place) for place in range(len(pile) - 8, len(pile)))
    assert max(suggest(labeller.unit_features, pile, found, 20)) < len(pile) - 8


def test_suggestions_of_a_large_pile_are_quick(backbone: Pretrained) -> None:
    labeller, pile, _ = split_up(backbone, *made_up(10, 1201, 64), [1] * 10)
    pile = normalised(pile)
    found = labeller.label_features(pile)
    start = time.process_time()
    assert len(set(suggest(labeller.unit_features, pile, found, 20))) == 20
    assert time.process_time() - start < 5


def test_a_labeller_says_what_it_is(backbone: Pretrained, tmp_path: Path) -> None:
    labeller, _, _ = split_up(backbone, *made_up(2, 3), [1, 1])
    assert labeller.describe() == f"features of {NAME}, heads weighed by the labelled pictures"
    assert not labeller.keeps_features
    kept = replace(labeller, cache=FeatureCache(tmp_path / "cache"))
    assert kept.keeps_features
    (tmp_path / "file").write_bytes(b"")
    assert not replace(labeller, cache=FeatureCache(tmp_path / "file")).keeps_features
