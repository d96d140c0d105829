"""Heads of the older trained methods, for the tests of what holds for all heads."""

from trident.methods.assoc_align import AssociativeAlignment
from trident.methods.base import HeadOnFeatures
from trident.methods.baseline import Baseline
from trident.methods.baseline_plus_plus import BaselinePlusPlus
from trident.methods.feat import Feat
from trident.methods.frn import FeatureReconstruction
from trident.methods.relation_network import RelationNetwork
from trident.methods.s2m2 import S2M2

CLASSES = 5  # of the training split of conftest's tiny store
CLASSICS: dict[str, HeadOnFeatures] = {
    "Baseline": Baseline(CLASSES, steps=60),
    "Baseline++": BaselinePlusPlus(CLASSES, steps=60),
    "Relation Networks": RelationNetwork(width=6, hidden=5),
    "FEAT": Feat(),
    "transductive FEAT": Feat(transductive=True),
    "FRN": FeatureReconstruction(),
    "S2M2": S2M2(CLASSES, steps=30),
    "associative alignment": AssociativeAlignment(CLASSES, steps=30, related=2),
}
CLASSICS_GOLDEN = {  # accuracies on features with random weights, balanced and with unequal class sizes
    "Baseline": (82.7, 82.85),
    "Baseline++": (82.7, 83.3),
    "Relation Networks": (18.95, 19.05),
    "FEAT": (82.9, 83.35),
    "transductive FEAT": (90.75, 85.5),
    "FRN": (78.0, 77.55),
    "associative alignment": (82.7, 83.3),
}
