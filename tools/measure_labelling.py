"""Measure labelling beyond accuracy: `python tools/measure_labelling.py WHAT STORE[:SPLIT] ...`.

WHAT is one of these:

`none`: how well pictures that belong to none of the classes are told from those that do. The first store has the
classes; the strangers come from its other classes and from the stores after it.
`suggest`: accuracy on the pile after labelling the suggested pictures, and after labelling as many random ones.
`default`: the default head beside logistic regression and soft k-means on the same features, its calibration, and how
many labels it expects to be right.

Stores are made by `trident data prepare --features efficientnet-lite0`, or all of them with another backbone.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from trident.backbones.pretrained import BACKBONES, DEFAULT, Pretrained
from trident.data.store import open_store
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.label_latents import latents_for
from trident.labelling.suggesting import suggest
from trident.labelling.typicality import LEAST_TYPICAL, normalised
from trident.measuring.record import mean_and_interval
from trident.methods.transductive.soft_kmeans import SoftKMeans
from trident.tasks.task import Task

TASKS, WAYS, SEED = 200, 5, 0
DRAWS = 40  # for each number of ways and shots
TASKS_TO_SUGGEST = 100  # each labels three piles


def main() -> None:
    measures = {"none": none_of_these, "suggest": suggestions, "default": default}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=measures)
    parser.add_argument("stores", nargs="+", metavar="STORE[:SPLIT]")
    asked = parser.parse_args()
    stores = [classes_of(place) for place in asked.stores]
    if len({store.backbone for store in stores}) > 1:
        parser.error("all stores must hold features of the same backbone")
    measures[asked.what](stores)


class Data(NamedTuple):
    name: str  # of the dataset and split
    backbone: str
    classes: list[np.ndarray]  # features of unit length of each class, (picture, feature)


def classes_of(place: str) -> Data:
    name, _, split = place.partition(":")
    store = open_store(Path(name))
    if not store.features_of:
        raise SystemExit(f"{name} holds images: make a store of features with 'trident data prepare --features'")
    entries = store.classes_of(split or "val")
    features = [normalised(np.array(store.images[entry.start : entry.start + entry.count])) for entry in entries]
    return Data(f"{store.dataset} {split or 'val'}", store.features_of, features)


def labeller_of(of: str, features: np.ndarray, labels: np.ndarray, n_classes: int) -> FeatureLabeller:
    """`of`: the backbone that computed the features."""
    backbone = Pretrained(of, BACKBONES[DEFAULT].facts, features.shape[1], "", lambda pixels: pixels)
    return FeatureLabeller(backbone, tuple(map(str, range(n_classes))), features, labels, latents_for(of))


def none_of_these(stores: list[Data]) -> None:
    """15 pictures of each class and 8 strangers in each pile."""
    (name, of, classes), *others = stores
    for shots in (1, 5):
        for stranger, pool in [(f"other classes of {name}", None), *((other.name, other.classes) for other in others)]:
            areas, lost, found = [], [], []
            for task in range(TASKS):
                random = np.random.default_rng((SEED, shots, task))
                chosen = random.choice(len(classes), WAYS, replace=False)
                drawn = [classes[c][random.permutation(len(classes[c]))] for c in chosen]
                rest = [c for c in range(len(classes)) if c not in chosen]
                strangers = np.concatenate([classes[c] for c in rest] if pool is None else pool)
                strangers = strangers[random.choice(len(strangers), 8, replace=False)]
                members = np.concatenate([some[shots : shots + 15] for some in drawn])
                support = np.concatenate([some[:shots] for some in drawn])
                labeller = labeller_of(of, support, np.repeat(np.arange(WAYS), shots), WAYS)
                typical = labeller.label_features(np.concatenate([members, strangers])).typicality
                assert typical is not None
                is_member = np.arange(len(typical)) < len(members)
                areas.append(roc_auc_score(is_member, typical))
                lost.append(np.mean(typical[is_member] < LEAST_TYPICAL))
                found.append(np.mean(typical[~is_member] < LEAST_TYPICAL))
            protocol = f"{name}, {WAYS}-way {shots}-shot, 15 pictures of each class and 8 of {stranger}, {TASKS} tasks"
            marked = f"{100 * np.mean(found):.1f} % of the strangers, {100 * np.mean(lost):.1f} % of the others"
            area, interval = mean_and_interval(np.array(areas))
            print(f"{protocol}: AUROC {area:.3f} ± {interval:.3f}; marked: {marked}")


def suggestions(stores: list[Data]) -> None:
    """Piles with 10 to 39 pictures of each class. Accuracy is that of all pictures that are still unlabelled."""
    for name, of, classes in stores:
        for shots in (1, 5):
            for number in (5, 10, 20):
                accuracy: dict[str, list[float]] = {"before": [], "random": [], "suggested": []}
                for task in range(TASKS_TO_SUGGEST):
                    random = np.random.default_rng((SEED, shots, task))
                    features: list[np.ndarray] = []
                    labels: list[int] = []
                    first: list[int] = []
                    for way, c in enumerate(random.choice(len(classes), WAYS, replace=False)):
                        count = min(len(classes[c]), shots + int(random.integers(10, 40)))
                        first += list(range(len(labels), len(labels) + shots))
                        features.append(classes[c][random.permutation(len(classes[c]))[:count]])
                        labels += [way] * count
                    everything, truth = np.concatenate(features), np.array(labels)
                    pile = np.setdiff1d(np.arange(len(truth)), first)
                    before = labeller_of(of, everything[first], truth[first], WAYS).label_features(everything[pile])
                    accuracy["before"].append(np.mean(before.probabilities.argmax(1) == truth[pile]))
                    chosen = suggest(everything[first], everything[pile], before, number)
                    drawn = random.choice(len(pile), number, replace=False)
                    for kind, new in (("random", drawn), ("suggested", chosen)):
                        known, rest = np.r_[first, pile[new]], np.delete(pile, new)
                        after = labeller_of(of, everything[known], truth[known], WAYS).label_features(everything[rest])
                        accuracy[kind].append(np.mean(after.probabilities.argmax(1) == truth[rest]))
                difference = 100 * (np.array(accuracy["suggested"]) - np.array(accuracy["random"]))
                mean, interval = mean_and_interval(difference)
                shown = ", ".join(f"{kind} {100 * np.mean(values):.1f}" for kind, values in accuracy.items())
                print(
                    f"{name}, {WAYS}-way {shots}-shot, {number} more labels, {TASKS_TO_SUGGEST} tasks: {shown}; "
                    f"difference {mean:+.1f} ± {interval:.1f}"
                )


def default(stores: list[Data]) -> None:
    """Piles with 15 pictures of each class, or as many in all with class sizes from Dirichlet(0.5)."""
    print("data, ways, shots, sizes | default, alone, best regression, soft k-means | ECE | expected - right, inside")
    for name, of, classes in stores:
        for ways, shots, alpha in product((5, 10, 20), (1, 2, 5, 10, 20), (None, 0.5)):
            if ways <= len(classes):
                draws = [_draw(classes, ways, shots, alpha, draw) for draw in range(DRAWS)]
                print(f"{name}, {ways}, {shots}, {alpha or 'equal'} | {_default_on(of, ways, draws)}", flush=True)


class Draw(NamedTuple):
    support: np.ndarray  # features (picture, feature)
    labels: np.ndarray
    pile: np.ndarray  # features (picture, feature)
    truth: np.ndarray


def _draw(classes: list[np.ndarray], ways: int, shots: int, alpha: float | None, draw: int) -> Draw:
    random = np.random.default_rng((draw, ways, shots, int(10 * (alpha or 0))))
    chosen = random.choice(len(classes), ways, replace=False)
    sizes = [15] * ways if alpha is None else random.multinomial(15 * ways, random.dirichlet([alpha] * ways))
    drawn = [classes[c][random.permutation(len(classes[c]))] for c in chosen]
    piles = [some[shots:][:size] for some, size in zip(drawn, sizes, strict=True)]
    return Draw(
        np.concatenate([some[:shots] for some in drawn]),
        np.repeat(np.arange(ways), shots),
        np.concatenate(piles),
        np.repeat(np.arange(ways), [len(pile) for pile in piles]),
    )


def _default_on(of: str, ways: int, draws: list[Draw]) -> str:
    right: dict[str, list[np.ndarray]] = {"default": [], "alone": [], "10": [], "100": [], "soft k-means": []}
    confidences, errors, inside = [], [], []
    for support, labels, pile, truth in draws:
        labeller = labeller_of(of, support, labels, ways)
        labelled = labeller.label_features(pile)
        right["default"].append(labelled.probabilities.argmax(1) == truth)
        confidences.append(labelled.probabilities.max(1))
        right["alone"].append(labeller.label_features(pile, together=False).probabilities.argmax(1) == truth)
        for penalty in ("10", "100"):
            regression = LogisticRegression(C=float(penalty), max_iter=300).fit(support, labels)
            right[penalty].append(regression.predict(pile) == truth)
        task = Task(torch.from_numpy(np.concatenate([support, pile]))[None], torch.from_numpy(labels)[None], ways)
        right["soft k-means"].append(SoftKMeans().head({}, task.images, task)[0].argmax(1).numpy() == truth)
        if labelled.expected is not None:
            share = right["default"][-1].mean()
            errors.append(labelled.expected.share - share)
            inside.append(labelled.expected.low <= share <= labelled.expected.high)
    means = {name: 100 * np.mean([one.mean() for one in some]) for name, some in right.items()}
    best = max(means["10"], means["100"])
    confidence, correct = np.concatenate(confidences), np.concatenate(right["default"])
    bins = np.minimum((confidence * 15).astype(int), 14)
    ece = sum(abs((confidence - correct)[bins == one].sum()) for one in range(15)) / len(confidence)
    expected = f"{100 * np.mean(errors):+.1f}, {100 * np.mean(inside):.0f} %" if errors else "not judged"
    shown = ", ".join(f"{value:.1f}" for value in (means["default"], means["alone"], best, means["soft k-means"]))
    return f"{shown} | {ece:.3f} | {expected}"


if __name__ == "__main__":
    main()
