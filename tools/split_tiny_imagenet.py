"""Splits the 200 classes of Tiny ImageNet by branches of WordNet, as tieredImageNet splits those of ImageNet.

    python tools/split_tiny_imagenet.py FOLDER data.noun > tools/tiny_imagenet_split.json

FOLDER has a folder for each class, named by its WordNet id; data.noun is a file of WordNet 3.0. A class belongs to the
first branch below that is among its hypernyms; all classes of no branch are for training.
"""

import json
import sys
from pathlib import Path

BRANCHES = {
    "test": ("conveyance", "covering", "geological_formation"),
    "val": ("structure", "food"),
}


def nouns(path: Path) -> dict[int, tuple[str, list[int]]]:
    """By id: the first word, and the ids of the direct hypernyms."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("  "):
            continue  # the licence
        fields = line.partition("|")[0].split()
        pointers = 4 + 2 * int(fields[3], 16)
        entries = [fields[pointers + 1 + 4 * place :][:2] for place in range(int(fields[pointers]))]
        found[int(fields[0])] = fields[4], [int(number) for kind, number in entries if kind in ("@", "@i")]
    return found


def branch_of(number: int, words: dict[int, tuple[str, list[int]]]) -> str:
    """train, val or test."""
    while True:
        word, above = words[number]
        for split, branches in BRANCHES.items():
            if word in branches:
                return split
        if not above:
            return "train"
        number = above[0]


def main(folder: Path, wordnet: Path) -> None:
    words = nouns(wordnet)
    split: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for name in sorted(path.name for path in folder.iterdir()):
        split[branch_of(int(name[1:]), words)].append(name)
    print(json.dumps(split, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
