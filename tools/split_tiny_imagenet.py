"""Splits the 200 classes of Tiny ImageNet by branches of WordNet, as tieredImageNet splits those of ImageNet.

    python tools/split_tiny_imagenet.py FOLDER data.noun > tools/tiny_imagenet_split.json

FOLDER has a folder for each class, named by its WordNet id; data.noun is a file of WordNet 3.0. A class belongs to the
first branch below that is among its hypernyms, by whichever way upwards; classes of no branch are for training.
"""

import argparse
import json
from pathlib import Path

BRANCHES = {  # ids of WordNet 3.0
    "test": (3100490, 3122748, 9287968),  # conveyance, covering, geological formation
    "val": (4341686, 7555863, 21265),  # structure, food (solid), food (nutrient)
}


def hypernyms(path: Path) -> dict[int, list[int]]:
    """The direct hypernyms of every noun, by their ids."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("  "):
            continue  # the licence
        fields = line.partition("|")[0].split()
        pointers = 4 + 2 * int(fields[3], 16)  # after the words
        entries = [fields[pointers + 1 + 4 * place :][:2] for place in range(int(fields[pointers]))]
        found[int(fields[0])] = [int(number) for kind, number in entries if kind in ("@", "@i")]
    return found


def all_above(number: int, above: dict[int, list[int]]) -> set[int]:
    """All hypernyms, direct or not."""
    return set(above[number]).union(*(all_above(one, above) for one in above[number]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wordnet", type=Path, metavar="data.noun")
    asked = parser.parse_args()
    above = hypernyms(asked.wordnet)
    split: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for name in sorted(path.name for path in asked.folder.iterdir()):
        kinds = all_above(int(name[1:]), above)
        split[next((part for part, branches in BRANCHES.items() if kinds.intersection(branches)), "train")].append(name)
    print(json.dumps(split, indent=1))


if __name__ == "__main__":
    main()
