"""What unlabelled images are worth to TRIDENT: `python -m studies.ablation.measure_unlabelled OUT.json STORE`.

Position-free TRIDENT, or the model of `--weights`, is measured on the very same queries without and with further images
of each class (`--images`), whose labels it does not get, and with as many of five other classes between them. It uses
them in three ways: in the refinement of its prototypes alone; with inner steps on the labelled images besides; and with
inner steps that learn from the unlabelled ones too.

STORE may be `glyphs`. Results are added to the file, and what it has is not measured again. Other tasks, weights or
settings need another one. Without a store, the file is printed: for each number of shots a table of what unlabelled
images change, and a list of what inner steps change, as paired differences. Inner steps on photographs need a GPU
(`--device cuda`).
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trident.data.glyphs import open_glyphs
from trident.data.store import open_store
from trident.errors import TridentError
from trident.files import atomic_file
from trident.learning.checkpoint import load_checkpoint
from trident.measuring.evaluate import evaluate
from trident.measuring.record import mean_and_interval
from trident.recipes.loading import with_overrides

WEIGHTS = {1: "mini-5w1s-set", 5: "mini-5w5s-set"}  # by shots
WAYS = ["refinement", "and inner steps", "on the unlabelled too"]  # to use unlabelled images
OTHER_CLASSES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("store", nargs="?", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--shots", nargs="+", type=int, default=list(WEIGHTS))
    parser.add_argument("--weights", help="of another model, for any number of shots, such as mini-ensemble")
    parser.add_argument("--images", nargs="+", type=int, default=[20, 50, 100], help="unlabelled images of each class")
    parser.add_argument("--queries", type=int, default=15, help="of each class")
    parser.add_argument("--steps", type=int, default=5, help="inner steps, where there are any")
    parser.add_argument("--unlabelled-weight", type=float, default=1.0, help="in inner steps on the unlabelled, too")
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tasks-per-chunk", type=int, help="computed at once: fewer need less memory")
    parser.add_argument("--settings", nargs="*", default=[], help="for all ways, for example method.inner_rate=0.01")
    asked = parser.parse_args()
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if asked.store is None and not results:
        parser.error(f"{asked.out} has no results: give a store to measure on")
    if asked.store is None:
        print_tables(results)
        return
    try:
        measure(asked, parser, results)
    except TridentError as error:
        parser.error(str(error))


def measure(asked: argparse.Namespace, parser: argparse.ArgumentParser, results: dict[str, Any]) -> None:
    store = open_glyphs() if str(asked.store) == "glyphs" else open_store(asked.store)
    kept = ("split", "weights", "tasks", "queries", "steps", "unlabelled_weight", "settings")
    measured = {name: getattr(asked, name) for name in kept}
    amounts = [(0, 0), *((images, others) for others in (0, OTHER_CLASSES) for images in asked.images)]
    if any(result.get("measured", measured) != measured for result in results.values()):
        parser.error(f"{asked.out} has results of other tasks, weights or settings: give another file")
    for shots in asked.shots:
        checkpoint = load_checkpoint(asked.weights or WEIGHTS[shots])
        for images, distractors in amounts:
            for way in asked.ways:
                key = f"{shots} | {way} | {images} | {distractors}"
                if key in results:
                    continue
                episode = {
                    "n_shot": shots,
                    "n_query": asked.queries,
                    "n_unlabelled": images,
                    "distractors": distractors,
                }
                settings = [f"episode.{name}={value}" for name, value in episode.items()]
                if hasattr(checkpoint.recipe.method, "unlabelled_weight"):
                    steps = 0 if way == "refinement" else asked.steps
                    weight = asked.unlabelled_weight if way == "on the unlabelled too" else 0
                    settings += [f"method.inner_steps={steps}", f"method.unlabelled_weight={weight}"]
                recipe = with_overrides(checkpoint.recipe, [*settings, *asked.settings])
                model = replace(checkpoint, recipe=recipe)
                found = evaluate(
                    model,
                    store,
                    split=asked.split,
                    tasks=asked.tasks,
                    seed=0,
                    device=asked.device,
                    precision=asked.precision,
                    tasks_per_chunk=asked.tasks_per_chunk,
                )
                results[key] = {
                    "measured": measured,
                    "protocol": found.describe_protocol(),
                    "accuracies": found.predictions.accuracies.tolist(),
                }
                with atomic_file(asked.out) as file:
                    file.write(json.dumps(results, indent=1).encode())
                print(f"{key}: {found.accuracy:.2f} ± {found.ci95:.2f}", flush=True)


def print_tables(results: dict[str, dict[str, object]]) -> None:
    """For each way: accuracy, and the points that unlabelled images bring. Then the points that inner steps bring."""
    accuracies = {key: np.array(result["accuracies"]) for key, result in results.items()}
    amounts = sorted({tuple(map(int, key.split(" | ")[2:])) for key in results}, key=lambda amount: amount[::-1])
    for shots in WEIGHTS:
        ways = [way for way in WAYS if f"{shots} | {way} | 0 | 0" in results]
        if not ways:
            continue
        print(f"| {shots}-shot: unlabelled images of each class | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
        for images, distractors in amounts:
            row = [f"{images}{f', and of {distractors} other classes' if distractors else ''}"]
            for way in ways:
                without = accuracies[f"{shots} | {way} | 0 | 0"]
                found = accuracies.get(f"{shots} | {way} | {images} | {distractors}")
                if found is None:
                    row.append("")
                elif images == 0:
                    row.append("{:.2f} ± {:.2f}".format(*mean_and_interval(found)))
                else:
                    row.append("{:.2f} ({:+.2f} ± {:.2f})".format(found.mean(), *mean_and_interval(found - without)))
            print(f"| {' | '.join(row)} |")
        print()
        for way in ways[1:]:
            for images, distractors in amounts:
                keys = [f"{shots} | {one} | {images} | {distractors}" for one in (ways[0], way)]
                if all(key in accuracies for key in keys):
                    change = mean_and_interval(accuracies[keys[1]] - accuracies[keys[0]])
                    print("{} against {}: {:+.2f} ± {:.2f}".format(keys[1], ways[0], *change))
        print()
    protocols = dict.fromkeys(str(result["protocol"]) for result in results.values())
    print("\n".join(f"- {protocol}" for protocol in protocols))


if __name__ == "__main__":
    main()
