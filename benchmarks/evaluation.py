"""Time the evaluation of many glyph tasks, vectorised, against task after task in the same run.

`python benchmarks/evaluation.py --tasks 600` (the default). Two yardsticks: the plain loop of `plain_loop.py`, which is
how most code evaluates, and this library given one task at a time.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from plain_loop import plain_predict

from trident.data.glyphs import open_glyphs
from trident.evaluate import Evaluation, evaluate, set_up
from trident.model import Trident
from trident.recipes import load_recipe


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--recipe", default="glyphs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    recipe, store = load_recipe(arguments.recipe, arguments.settings), open_glyphs()
    model = Trident(recipe.model, recipe.episode)
    parameters, running = model.initial(0), model.initial_running()

    def ours(tasks: int, at_once: int | None = None) -> Evaluation:
        return evaluate(recipe, parameters, running, store, split="test", tasks=tasks, seed=0, tasks_per_chunk=at_once)

    source = set_up(recipe, parameters, running, store, split="test", seed=0).source

    def plain(tasks: int) -> np.ndarray:
        return np.concatenate([plain_predict(parameters, source.batch([i]), recipe).numpy() for i in range(tasks)])

    ours(32), plain(8)  # warm up
    difference = np.abs(np.exp(ours(8).predictions.log_probabilities) - np.exp(plain(8))).max()
    times = {
        "vectorised": seconds(lambda: ours(arguments.tasks)),
        "plain_loop": seconds(lambda: plain(arguments.tasks)),
        "one_task_at_a_time": seconds(lambda: ours(arguments.tasks, 1)),
    }
    ratio = times["plain_loop"] / times["vectorised"]
    if arguments.json:
        print(json.dumps({"tasks": arguments.tasks, **times, "ratio": ratio, "difference": float(difference)}))
        return
    print(
        f"{recipe.name}, {recipe.episode.describe()}, {recipe.episode.n_query} queries per class, {arguments.tasks} "
        f"tasks, {recipe.adaptation.steps} inner steps, {torch.get_num_threads()} cores, torch {torch.__version__}"
    )
    for name, value in times.items():
        print(f"{name.replace('_', ' '):20} {value:8.2f} s   {1000 * value / arguments.tasks:6.1f} ms a task")
    print(f"plain loop / vectorised: {ratio:.2f}; largest difference of a probability {difference:.1e}")


if __name__ == "__main__":
    main()
