"""Measure labelling beyond accuracy: `python tools/measure_labelling.py WHAT STORE[:SPLIT] ...`.

WHAT is one of these:

`none`: how well pictures that belong to none of the classes are told from those that do. The first store has the
classes; the strangers come from its other classes and from the stores after it.
`suggest`: accuracy on the pile after labelling the suggested pictures, and after labelling as many random ones.
`calibration`: the expected calibration error of the probabilities that `trident predict` gives.
`temperatures`: fits the numbers in `labelling/feature_labeller.py` that these probabilities depend on.

Stores are made by `trident data prepare --features efficientnet-lite0`, or all of them with another backbone.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score

from trident.backbones.pretrained import BACKBONES, DEFAULT, Pretrained
from trident.data.store import open_store
from trident.labelling.feature_labeller import FeatureLabeller
from trident.labelling.label_latents import latents_for
from trident.labelling.suggesting import suggest
from trident.labelling.typicality import LEAST_TYPICAL, normalised
from trident.measuring.calibration import softmax
from trident.measuring.record import mean_and_interval
from trident.methods.transductive.soft_kmeans import SoftKMeans

TASKS, WAYS, SEED = 200, 5, 0
SEED_TO_FIT, TASKS_TO_FIT = 1, 60  # for each number of shots
TASKS_TO_SUGGEST = 100  # each labels three piles


def main() -> None:
    measures = {"none": none_of_these, "suggest": suggestions, "calibration": calibration, "temperatures": temperatures}
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


def calibration(stores: list[Data]) -> None:
    """Balanced piles with 10 pictures of each class, ten bins of confidence."""
    for name, of, classes in stores:
        for shots in (1, 5):
            for together in (True, False):
                sure: list[np.ndarray] = []
                right: list[np.ndarray] = []
                for task in range(TASKS):
                    random = np.random.default_rng((SEED, shots, task))
                    chosen = random.choice(len(classes), WAYS, replace=False)
                    drawn = [classes[c][random.permutation(len(classes[c]))[: shots + 10]] for c in chosen]
                    support = np.concatenate([some[:shots] for some in drawn])
                    labeller = labeller_of(of, support, np.repeat(np.arange(WAYS), shots), WAYS)
                    pile = np.concatenate([some[shots:] for some in drawn])
                    found = labeller.label_features(pile, together).probabilities
                    sure.append(found.max(1))
                    right.append(found.argmax(1) == np.repeat(np.arange(WAYS), [len(some) - shots for some in drawn]))
                confidence, correct = np.concatenate(sure), np.concatenate(right)
                bins = np.minimum((confidence * 10).astype(int), 9)
                gaps = [abs((confidence - correct)[bins == b].sum()) for b in range(10)]
                how = "together" if together else "each alone"
                print(
                    f"{name}, {WAYS}-way {shots}-shot, 10 pictures of each class, {how}, {TASKS} tasks: ECE "
                    f"{sum(gaps) / len(confidence):.3f}, accuracy {100 * correct.mean():.1f} %, mean probability "
                    f"{100 * confidence.mean():.1f} %"
                )


def temperatures(stores: list[Data]) -> None:
    """Minimise the cross-entropy of piles of 50 pictures, of balanced, Dirichlet(2) and Dirichlet(0.5) sizes."""
    logits: dict[bool, list[np.ndarray]] = {True: [], False: []}  # of each pile, (picture, class)
    inputs: dict[bool, list[list[float]]] = {True: [], False: []}
    truths: list[np.ndarray] = []
    for _, of, classes in stores:
        for shots in (1, 2, 5, 10, 20):
            for task in range(TASKS_TO_FIT):
                random = np.random.default_rng((SEED_TO_FIT, shots, task))
                chosen = random.choice(len(classes), WAYS, replace=False)
                drawn = [classes[c][random.permutation(len(classes[c]))] for c in chosen]
                alpha = (math.inf, 2.0, 0.5)[task % 3]
                shares = np.full(WAYS, 1 / WAYS) if alpha == math.inf else random.dirichlet([alpha] * WAYS)
                piles = [some[shots:][: round(10 * WAYS * share)] for some, share in zip(drawn, shares, strict=True)]
                support = np.concatenate([some[:shots] for some in drawn])
                labeller = labeller_of(of, support, np.repeat(np.arange(WAYS), shots), WAYS)
                for together in (True, False):
                    found = labeller.logits(np.concatenate(piles), together)
                    logits[together].append(found)
                    similarity = found.max(1).mean() / SoftKMeans().scale
                    inputs[together].append([1.0, math.log(shots), similarity] if together else [1.0, math.log(shots)])
                truths.append(np.repeat(np.arange(WAYS), [len(pile) for pile in piles]))
    for together, name in ((True, "together"), (False, "each alone")):

        def loss(weights: np.ndarray, together: bool = together) -> float:
            total = 0.0
            for pile, values, truth in zip(logits[together], inputs[together], truths, strict=True):
                chances = softmax(pile / math.exp(np.dot(weights, values)))
                total -= float(np.log(chances[np.arange(len(truth)), truth].clip(1e-12)).mean())
            return total / len(truths)

        found = minimize(loss, np.zeros(len(inputs[together][0])), method="Nelder-Mead")
        print(f"{name}: {np.round(found.x, 3)}, mean cross-entropy {found.fun:.4f}")


if __name__ == "__main__":
    main()
