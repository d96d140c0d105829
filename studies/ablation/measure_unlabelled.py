"""What unlabelled images are worth to TRIDENT: `python -m studies.ablation.measure_unlabelled OUT.jsonl STORE`.

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
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from trident.data.glyphs import open_glyphs
from trident.data.store import open_store
from trident.errors import TridentError
from trident.learning.checkpoint import load_checkpoint
from trident.measuring.evaluate import evaluate
from trident.measuring.record import Record, change_line, difference, plus_minus, read_lines
from trident.recipes.loading import with_overrides
from trident.recipes.plain_values import checked

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
    try:
        results = read_lines(asked.out)
        if asked.store is not None:
            measure(asked, results)
        elif results:
            print_tables({key: checked(Record, line["record"]) for key, line in results.items()})
        else:
            raise TridentError(f"{asked.out} has no results: give a store to measure on")
    except TridentError as error:
        parser.error(str(error))


def measure(asked: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    store = open_glyphs() if str(asked.store) == "glyphs" else open_store(asked.store)
    kept = ("split", "weights", "tasks", "queries", "steps", "unlabelled_weight", "settings")
    measured = {name: getattr(asked, name) for name in kept}
    if any(result.get("measured", measured) != measured for result in results.values()):
        raise TridentError(f"{asked.out} has results of other tasks, weights or settings: give another file")
    amounts = [(0, 0), *((images, others) for others in (0, OTHER_CLASSES) for images in asked.images)]
    for shots, (images, distractors), way in itertools.product(asked.shots, amounts, asked.ways):
        key = f"{shots} | {way} | {images} | {distractors}"
        if key in results:
            continue
        checkpoint = load_checkpoint(asked.weights or WEIGHTS[shots])
        settings = [f"episode.n_shot={shots}", f"episode.n_query={asked.queries}"]
        settings += [f"episode.n_unlabelled={images}", f"episode.distractors={distractors}"]
        if hasattr(checkpoint.recipe.method, "unlabelled_weight"):
            steps = 0 if way == "refinement" else asked.steps
            weight = asked.unlabelled_weight if way == "on the unlabelled too" else 0
            settings += [f"method.inner_steps={steps}", f"method.unlabelled_weight={weight}"]
        model = replace(checkpoint, recipe=with_overrides(checkpoint.recipe, [*settings, *asked.settings]))
        options = {name: getattr(asked, name) for name in ("split", "tasks", "device", "precision", "tasks_per_chunk")}
        found = evaluate(model, store, seed=0, **options).record()
        line = {"measured": measured, "record": found.to_json()}
        change_line(asked.out, key, lambda _, line=line: line)  # type: ignore[misc]
        print(f"{key}: {found.figure}", flush=True)


def print_tables(results: dict[str, Record]) -> None:
    """For each way: accuracy, and the points that unlabelled images bring. Then the points that inner steps bring."""
    amounts = sorted({tuple(map(int, key.split(" | ")[2:])) for key in results}, key=lambda amount: amount[::-1])
    for shots in WEIGHTS:
        ways = [way for way in WAYS if f"{shots} | {way} | 0 | 0" in results]
        if not ways:
            continue
        print(f"| {shots}-shot: unlabelled images of each class | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
        for images, distractors in amounts:
            row = [f"{images}{f', and of {distractors} other classes' if distractors else ''}"]
            for way in ways:
                found = results.get(f"{shots} | {way} | {images} | {distractors}")
                above = difference(found, results[f"{shots} | {way} | 0 | 0"]) if found and images else None
                row.append("" if not found else found.figure if not above else f"{found.accuracy:.2f} ({shown(above)})")
            print(f"| {' | '.join(row)} |")
        print()
        for way, (images, distractors) in itertools.product(ways[1:], amounts):
            one, other = (f"{shots} | {name} | {images} | {distractors}" for name in (way, ways[0]))
            if one in results and other in results:
                print(f"{one} against {ways[0]}: {shown(difference(results[one], results[other]))}")
        print()
    print("\n".join(f"- {protocol}" for protocol in dict.fromkeys(record.described for record in results.values())))


def shown(points: tuple[float, float] | None) -> str:
    return "other tasks" if points is None else plus_minus(*points, sign="+")


if __name__ == "__main__":
    main()
