"""Compare heads on frozen features on the same tasks: `python tools/measure_heads.py OUT.json STORE[:SPLIT]...`.

The stores are made by `trident data prepare --features`. Every result keeps its protocol. Heads that are slow can be
left to another call with `--heads` and `--tasks`; results are added to the file, and what it has is not measured again.
Without stores, the file is printed as tables, with paired differences between TRIDENT and the best head that is not
trained.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trident.backbones.frozen import FrozenBackbone
from trident.backbones.pretrained import DEFAULT
from trident.data.store import ImageStore, open_store
from trident.learning.checkpoint import load_checkpoint
from trident.measuring.evaluate import Evaluation, evaluate
from trident.measuring.record import mean_and_interval
from trident.methods.trident.features import TridentOnFeatures

PILES: dict[str, dict[str, Any]] = {
    "balanced": {"balance": "balanced"},
    "Dirichlet(2)": {"balance": "dirichlet", "dirichlet_alpha": 2.0},
    "Dirichlet(0.5)": {"balance": "dirichlet", "dirichlet_alpha": 0.5},
    "one class absent": {"balance": "one_absent"},
    "alone": {"balance": "balanced"},
}
UNTRAINED = ("nearest-mean", "nearest-neighbours", "logistic-regression", "soft-kmeans-plain", "paddle", "soft-kmeans")
PLAIN: dict[str, Any] = {
    "centre": "task",
    "class_sizes": "equal",
    "support_weight": 1.0,
    "rounds": 6,
}  # usual soft k-means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("stores", nargs="*")
    parser.add_argument("--heads", nargs="+", default=[*UNTRAINED, "trident"])
    parser.add_argument("--piles", nargs="+", default=list(PILES))
    parser.add_argument("--shots", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if not asked.stores:
        print_tables(results)
    for place in asked.stores:
        name, _, split = place.partition(":")
        store = open_store(Path(name))
        for pile in asked.piles:
            for shots in asked.shots:
                for head in asked.heads:
                    if head == "trident" and store.features_of != DEFAULT:
                        continue  # it was trained on features of that backbone
                    key = f"{store.dataset} {store.features_of} {split or 'val'} | {pile} | {shots} | {head}"
                    if key in results:
                        continue
                    result = measured(head, store, split or "val", pile, shots, asked.tasks, asked.seed)
                    own = {"head": head, "pile": pile, "features_of": store.features_of}
                    results[key] = result.to_json() | own | {"of_tasks": result.predictions.accuracies.tolist()}
                    asked.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                    print(f"{key}: {result.accuracy:.2f} ± {result.ci95:.2f}", flush=True)


def print_tables(results: dict[str, dict[str, Any]]) -> None:
    """One table for each dataset: a row for each head, a column for each kind of pile and number of shots."""
    parts = [key.split(" | ") for key in results]
    for data in dict.fromkeys(part[0] for part in parts):
        heads = dict.fromkeys(part[3] for part in parts if part[0] == data)
        shots = sorted({part[2] for part in parts if part[0] == data}, key=int)
        piles = [pile for pile in PILES if any(part[:2] == [data, pile] for part in parts)]
        print(f"\n{data}, shots {' / '.join(shots)}\n\n| head | {' | '.join(piles)} |\n|{'---|' * (len(piles) + 1)}")
        for head in heads:
            cells = []
            for pile in piles:
                found = [results.get(f"{data} | {pile} | {shot} | {head}") for shot in shots]
                cells.append(" / ".join(f"{one['accuracy']:.1f} ± {one['ci95']:.1f}" if one else "" for one in found))
            print(f"| {head} | {' | '.join(cells)} |")
        if "trident" in heads:
            cells = [" / ".join(difference(results, data, pile, shot) for shot in shots) for pile in piles]
            print(f"| difference | {' | '.join(cells)} |")


def difference(results: dict[str, dict[str, Any]], data: str, pile: str, shots: str) -> str:
    """TRIDENT's accuracy minus that of soft k-means or, alone, of logistic regression, on the same tasks."""
    other = "logistic-regression" if pile == "alone" else "soft-kmeans"
    found = [results.get(f"{data} | {pile} | {shots} | {head}") for head in ("trident", other)]
    if any(one is None or "of_tasks" not in one for one in found):
        return ""
    mean, half = mean_and_interval(np.subtract(*(one["of_tasks"] for one in found if one)))
    return f"{mean:+.2f} ± {half:.2f}"


def measured(head: str, store: ImageStore, split: str, pile: str, shots: int, tasks: int, seed: int) -> Evaluation:
    trained = Path(head).exists()
    model = load_checkpoint(head if trained else f"features-{head.removesuffix('-plain')}")
    recipe = model.recipe
    method = replace(recipe.method, **PLAIN) if head.endswith("-plain") else recipe.method
    if pile == "alone":  # methods that give a query the same answer whatever other queries there are
        if isinstance(method, TridentOnFeatures):
            method = replace(method.for_few_queries(), classifier="logistic-regression")
        else:
            method = method.for_few_queries()
    recipe = replace(
        recipe,
        method=method,
        backbone=FrozenBackbone(store.features_of, int(store.images.shape[1])),
        episode=replace(recipe.episode, n_shot=shots),
        protocol=replace(recipe.protocol, **PILES[pile]),
    )
    return evaluate(replace(model, recipe=recipe), store, split=split, tasks=tasks, seed=seed)


if __name__ == "__main__":
    main()
