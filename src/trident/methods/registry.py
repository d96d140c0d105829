"""Which methods there are, by name. Nothing is imported until a method is asked for.

A method in another installed package is found too, if that package declares it as an entry point of the group
`trident.methods`. Weights files name their method, so only names from here are ever imported, never a path from a file.
"""

import ast
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from trident.errors import TridentError, did_you_mean
from trident.importing import imported


@dataclass(frozen=True)
class About:
    """Facts about a method. `trident methods` prints them; training and measuring use them.

    They are literals, because the list of methods reads them from the source, and hold for the default settings.
    """

    title: str
    citation: str  # authors and year
    paper: str
    trained_on: Literal["episodes", "classes", "nothing"] = "episodes"  # classes: batches of all training classes
    transductive: bool = False  # whether queries are classified together, apart from batch norm
    analyses: tuple[str, ...] = ()  # further analyses that it supports: "latents", "reconstructions"
    any_way: bool = True  # whether trained weights can classify tasks with any number of classes
    positional: bool = False  # whether weights are tied to positions in the task, so that the order of images matters


METHODS = {
    "trident": "trident.methods.trident.network:Trident",
    "protonet": "trident.methods.metric.protonet:ProtoNet",
    "matching": "trident.methods.metric.matching:MatchingNetwork",
    "simpleshot": "trident.methods.metric.simpleshot:SimpleShot",
    "nearest-mean": "trident.methods.metric.nearest_mean:NearestMean",
    "evidence": "trident.methods.evidence.method:Evidence",
    "soft-kmeans": "trident.methods.transductive.soft_kmeans:SoftKMeans",
    "trident-features": "trident.methods.trident.features:TridentOnFeatures",
    "paddle": "trident.methods.transductive.paddle:Paddle",
    "alpha-tim": "trident.methods.transductive.alpha_tim:AlphaTim",
    "logistic-regression": "trident.methods.metric.scikit_learn:LogisticRegressionHead",
    "nearest-neighbours": "trident.methods.metric.scikit_learn:NearestNeighbours",
    "tim": "trident.methods.transductive.tim:Tim",
    "laplacian-shot": "trident.methods.transductive.laplacian_shot:LaplacianShot",
    "pt-map": "trident.methods.transductive.pt_map:PtMap",
    "bms": "trident.methods.transductive.bms:Bms",
    "entropy-min": "trident.methods.transductive.entropy_min:EntropyMin",
    "k-reciprocal": "trident.methods.transductive.k_reciprocal:KReciprocal",
    "bd-cspn": "trident.methods.transductive.bd_cspn:BdCspn",
    "epnet": "trident.methods.transductive.epnet:EpNet",
    "tpn": "trident.methods.transductive.tpn:Tpn",
    "transductive-cnaps": "trident.methods.transductive.transductive_cnaps:TransductiveCnaps",
    "baseline": "trident.methods.metric.baseline:Baseline",
    "baseline-plus-plus": "trident.methods.metric.baseline_plus_plus:BaselinePlusPlus",
    "relation-network": "trident.methods.metric.relation_network:RelationNetwork",
    "feat": "trident.methods.metric.feat:Feat",
    "frn": "trident.methods.metric.frn:FeatureReconstruction",
    "s2m2": "trident.methods.metric.s2m2:S2M2",
    "assoc-align": "trident.methods.metric.assoc_align:AssociativeAlignment",
    "maml": "trident.methods.inner_loop.maml:Maml",
    "anil": "trident.methods.inner_loop.anil:Anil",
    "boil": "trident.methods.inner_loop.boil:Boil",
    "abml": "trident.methods.inner_loop.abml:Abml",
    "vampire": "trident.methods.inner_loop.vampire:Vampire",
    "platipus": "trident.methods.inner_loop.platipus:Platipus",
    "bmaml": "trident.methods.inner_loop.bmaml:BayesianMaml",
    "versa": "trident.methods.bayesian.versa:Versa",
    "dkt": "trident.methods.bayesian.dkt:DeepKernelTransfer",
    "ove-polya-gamma": "trident.methods.bayesian.ove_polya_gamma:OveGaussianProcess",
    "logistic-softmax-gp": "trident.methods.bayesian.logistic_softmax_gp:LogisticSoftmaxProcess",
    "sib": "trident.methods.transductive.sib:SyntheticInformationBottleneck",
    "metaqda": "trident.methods.bayesian.metaqda:MetaQda",
    "abpml": "trident.methods.bayesian.abpml:BayesianPrototypes",
    "ensemble": "trident.methods.ensemble:Ensemble",
    "ssr": "trident.methods.transductive.ssr:SelfSupervisedReranking",
}


def method_paths() -> dict[str, str]:
    """The import path of every method, by name. No other package can replace a method of this one."""
    return of_other_packages() | METHODS


@cache  # looking through all installed packages takes longer than reading a recipe
def of_other_packages() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="trident.methods")}


def check_method(name: str) -> None:
    if name not in method_paths():
        raise TridentError(f"no method is called '{name}'{did_you_mean(name, method_paths())}")


def method_class(name: str) -> Any:
    paths = method_paths()
    check_method(name)
    try:
        kind = imported(paths[name])
    except Exception as error:  # whatever another package does when it is imported
        raise TridentError(f"method '{name}' cannot be imported from {paths[name]}: {error!r}") from error
    if not (isinstance(kind, type) and isinstance(getattr(kind, "about", None), About)):
        raise TridentError(f"method '{name}': {paths[name]} is not a subclass of Method")
    return kind


def method_name(method: object) -> str:
    paths, own = method_paths(), f"{type(method).__module__}:{type(method).__qualname__}"
    # By its path first, which imports no other method; a package may also name its class by another path.
    known = [name for name, path in paths.items() if path == own]
    return known[0] if known else next(name for name in paths if method_class(name) is type(method))


def about(name: str) -> About:
    """The facts about a method. A method of another package is imported for that, one of this package is not."""
    if name not in METHODS:
        found: About = method_class(name).about
        return found
    module, _, own = METHODS[name].partition(":")
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    source = path.read_text("utf-8")
    start = source.index("about = About(", source.index(f"class {own}("))
    line = source[start : source.index("\n", start)]
    text = line if line.endswith(")") else source[start : source.index("\n    )", start)] + ")"  # as ruff formats it
    (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    values = {str(one.arg): ast.literal_eval(one.value) for one in statement.value.keywords}
    return About(*map(ast.literal_eval, statement.value.args), **values)
