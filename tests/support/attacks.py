"""Attacks on commands that write files: kills, failing calls, two commands at once, changed inputs, odd file systems.

A process that has loaded torch forks one child for each command, so that hundreds of cases take minutes. Which call is
attacked is counted in file-system calls (`system_calls.py`), so that a case happens again in the same way:

    python tests/support/attacks.py kill               # all cases of a kind
    python tests/support/attacks.py kill 'copy 102 '   # those whose names begin so
    python tests/support/attacks.py kill '' 10         # every tenth
"""

import errno
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attacked import COMMANDS, USUAL, World, check_said, finished, made, save_weights
from system_calls import READS, Call, Disk, Kill, LostReply, Wait, run
from trident.labelling.feature_cache import FeatureCache


@dataclass(frozen=True)
class Case:
    name: str
    attack: Callable[[Path], None]  # in a fresh folder


# Kinds of attack


def at(n: int, then: type[Exception] | int) -> Callable[[int, Call], int]:
    def rule(number: int, call: Call) -> int:
        if number == n:
            if isinstance(then, int):
                return then
            raise then
        return 0

    return rule


DISKS = (USUAL, Disk(links=False), Disk(links=False, locks=False))


def kills(world: World) -> Iterator[Case]:
    """kill -9 before each call that changes a file; then the same command again."""
    for name in world.commands:
        for disk in DISKS if name in ("copy", "move") else DISKS[::2]:

            def attack(folder: Path, name: str = name, n: int = 0, disk: Disk = disk) -> None:
                process = world.process(name, folder, None, disk, rule=at(n, Kill))
                run(process)
                assert process.code == -9, process.errors
                world.check(name, folder, done=False, disk=disk)
                finished(world, name, folder, "", disk)

            for n, call in world.places(name, disk):
                yield Case(f"{name}{disk} {n} {call}", functools.partial(attack, n=n))


def failing_calls(world: World) -> Iterator[Case]:
    """Each call that changes a file fails once: a full disk, a damaged one, a stale handle."""
    for name in world.commands:
        for n, call in world.places(name):
            error = (errno.ENOSPC, errno.EIO, errno.ESTALE)[n % 3]

            def attack(folder: Path, name: str = name, n: int = n, error: int = error) -> None:
                process = world.process(name, folder, rule=at(n, error))
                run(process)
                check_said(process, 0, 2)
                world.check(name, folder, done=False)
                finished(world, name, folder, process.errors)

            yield Case(f"{name} {errno.errorcode[error]} {n} {call}", attack)


def lost_replies(world: World) -> Iterator[Case]:
    """A network disk makes a call, but the answer is lost: the second try fails, since it is done already."""
    for name in world.commands:
        for n, call in world.places(name):
            if call.name.startswith(("link", "rename", "unlink", "mkdir")):

                def attack(folder: Path, name: str = name, n: int = n) -> None:
                    process = world.process(name, folder, rule=at(n, LostReply))
                    run(process)
                    check_said(process, 0, 2)
                    world.check(name, folder, done=False)
                    finished(world, name, folder, process.errors)

                yield Case(f"{name} {n} {call}", attack)


def failing_reads(world: World) -> Iterator[Case]:
    """A file or folder that is looked at fails once: with a stale handle of a network disk, or a damaged disk."""
    for name in world.commands:
        calls = enumerate(world.undisturbed(name, names=READS), 1)
        chosen = [(n, call) for n, call in calls if name == "predict" or "cache" not in call.path.parts]
        for place, (n, call) in enumerate(chosen[:: max(1, len(chosen) // 120)]):
            error = (errno.ESTALE, errno.EIO)[place % 2]

            def attack(folder: Path, name: str = name, n: int = n, error: int = error) -> None:
                process = world.process(name, folder, names=READS, rule=at(n, error))
                run(process)
                check_said(process, 0, 2)
                if "skipped" not in process.errors:
                    world.check(name, folder, done=False)
                finished(world, name, folder, process.errors)

            yield Case(f"{name} {errno.errorcode[error]} {n} {call}", attack)


PAIRS = (
    *(("predict", "predict"), ("predict", "onnx"), ("copy", "copy"), ("move", "move"), ("fit", "fit")),
    *(("prepare", "prepare"), ("features", "features"), ("train", "train"), ("predict", "clear")),
)


def pairs(world: World) -> Iterator[Case]:
    """One command waits at a call while another one with the same files runs to its end, or as far as it can."""
    for name, other in PAIRS:
        # Some use no locks beside those of the cache.
        for disk in DISKS[:1] if name in ("predict", "fit") else DISKS[::2]:

            def attack(folder: Path, name: str, other: str, n: int, disk: Disk) -> None:
                first = world.process(name, folder, None, disk, rule=at(n, Wait))
                arguments = ("data", "cache", "--clear") if other == "clear" else None
                second = world.process(name if other == "clear" else other, folder, arguments, disk)
                run(first, second, patience=2 if name == "train" else 0.5)
                check_said(first, 0, 2)
                check_said(second, 0, 2)
                if other in (name, "clear"):
                    world.check(name, folder, done=False, disk=disk)
                    if first.code and second.code and not COMMANDS[name].moves:
                        assert "another process" in first.errors + second.errors, first.errors + second.errors
                    finished(world, name, folder, first.errors + second.errors, disk)
                else:
                    tables = [world.expected[one]["labels.json"] for one in (name, other)]
                    assert (folder / "labels.json").read_bytes() in tables, "a table of neither"
                    world.check_cache(folder)

            if other in COMMANDS:
                world.undisturbed(other)
            for n, call in world.places(name, disk):
                attacked = functools.partial(attack, name=name, other=other, n=n, disk=disk)
                yield Case(f"{name} and {other}{disk} {n} {call}", attacked)


def in_place(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def by_renaming(path: Path, content: bytes) -> None:
    other = path.with_name(".new")
    other.write_bytes(content)
    other.replace(path)


def replaced_inputs(world: World) -> Iterator[Case]:
    """A file that a command reads is replaced while it runs, before each call that reads it: never a mixture, for good.

    Afterwards, with the new file and with the old one again, results are those without a cache.
    """
    for name, file, content in changed_inputs(world):
        after = results_with(world, name, file, content)
        world.undisturbed(name)
        calls = list(enumerate(world.undisturbed(name, names=READS), 1))
        places = [(n, call) for n, call in calls if call.path.name == Path(file).name]
        places += calls[len(calls) // 4 :: len(calls) // 4]  # after it is read
        for replace_file in (by_renaming, in_place):
            for n, call in places:

                def attack(
                    folder: Path,
                    name: str = name,
                    file: str = file,
                    content: bytes = content,
                    n: int = n,
                    replace_file: Callable[[Path, bytes], None] = replace_file,
                    after: dict[str, object] = after,
                ) -> None:
                    def rule(number: int, call: Call) -> int:
                        if number == n:
                            replace_file(folder / file, content)
                        return 0

                    process = world.process(name, folder, names=READS, rule=rule)
                    run(process)
                    check_said(process, 0, 2)
                    found = made(folder, COMMANDS[name])
                    assert found in (after, world.expected[name]) or process.code == 2, "neither the old nor the new"
                    assert found in (after, world.expected[name], {}), "something is made in spite of the error"
                    for wanted, now in ((after, content), (world.expected[name], (world.template / file).read_bytes())):
                        (folder / file).write_bytes(now)
                        for path in COMMANDS[name].made:
                            (folder / path).unlink(missing_ok=True)
                        again = world.process(name, folder)
                        run(again)
                        check_said(again, 0)
                        assert made(folder, COMMANDS[name]) == wanted, "wrong features are kept"
                    world.check_cache(folder)

                yield Case(f"{name} {file} {replace_file.__name__} {n} {call}", attack)


def changed_inputs(world: World) -> Iterator[tuple[str, str, bytes]]:
    from onnx_files import small_onnx  # takes long

    folder = world.fresh()
    small_onnx(folder / "small.onnx", weights=np.random.default_rng(4).standard_normal((5, 3, 3, 3)).astype(np.float32))
    save_weights(folder / "trained.safetensors", 1)
    yield "onnx", "small.onnx", (folder / "small.onnx").read_bytes()
    yield "weights", "trained.safetensors", (folder / "trained.safetensors").read_bytes()
    pile, others = sorted((folder / "pile").iterdir()), sorted((folder / "support").rglob("*.*"))
    yield "predict", f"pile/{pile[0].name}", others[-1].read_bytes()
    yield "predict", str(others[0].relative_to(folder)), others[-1].read_bytes()[:-1] + b"x"
    yield "fit", str(others[0].relative_to(folder)), others[-1].read_bytes()[:-1] + b"x"
    shutil.rmtree(folder)


def results_with(world: World, name: str, file: str, content: bytes) -> dict[str, object]:
    folder = world.fresh()
    (folder / file).write_bytes(content)
    process = world.process(name, folder)
    run(process)
    assert process.code == 0, process.errors
    found = made(folder, COMMANDS[name])
    shutil.rmtree(folder)
    return found


def clocks(world: World) -> Iterator[Case]:
    """The clock jumps at every look at it, and the files are from other times; also with a kill, and a small cache."""
    for name in world.commands:
        world.undisturbed(name)
        for seed in range(8):

            def attack(folder: Path, name: str = name, seed: int = seed) -> None:
                generator = random.Random(seed)

                def jumping() -> None:
                    def moment() -> float:
                        return generator.choice((0.0, 1.0, 1e9, 2e9, 4e9)) + generator.uniform(0, 1e6)

                    time.time, time.time_ns = moment, lambda: int(moment() * 1e9)
                    if seed % 2:
                        defaults = FeatureCache.__init__.__defaults__ or ()
                        FeatureCache.__init__.__defaults__ = (3 * 4 * 32, *defaults[1:])  # room for three pictures

                for path in folder.rglob("*"):
                    os.utime(path, (generator.choice((0, -1e6, 1e9, 4e9)),) * 2)
                if seed % 4 >= 2:
                    n = generator.randrange(1, len(world.undisturbed(name)))
                    run(world.process(name, folder, rule=at(n, Kill), prepare=jumping))
                    world.check(name, folder, done=False)
                for _ in range(2):
                    finished(world, name, folder, prepare=jumping)

            yield Case(f"{name} {seed}", attack)


KINDS: dict[str, Callable[[World], Iterator[Case]]] = {
    "kill": kills,
    "fail": failing_calls,
    "reply": lost_replies,
    "read": failing_reads,
    "pair": pairs,
    "replace": replaced_inputs,
    "clock": clocks,
}


FEW = {"kill": 2, "fail": 1, "reply": 1}  # cases for `make test`, of one command


def harm(world: World, cases: list[Case]) -> list[str]:
    """A line for each case that did harm."""
    found = []
    for number, case in enumerate(cases):
        if number % 50 == 0:
            print(f"{number} of {len(cases)}: {case.name}", file=sys.stderr, flush=True)
        folder = world.fresh()
        try:
            case.attack(folder)
        except Exception as error:
            found.append(f"{case.name}: {type(error).__name__}: {error}")
            print(found[-1], file=sys.stderr, flush=True)
        shutil.rmtree(folder)
    return found


def command_line(kinds: str, start: str = "", step: str = "1") -> None:
    with tempfile.TemporaryDirectory() as place:
        if kinds == "few":
            world = World.made(Path(place), ("copy",))
            found = [(list(KINDS[kind](world)), number) for kind, number in FEW.items()]
            cases = [some[len(some) * place // number] for some, number in found for place in range(number)]
        else:
            world = World.made(Path(place))
            cases = [case for kind in kinds.split(",") for case in KINDS[kind](world) if case.name.startswith(start)]
        cases = cases[:: int(step)]
        print(json.dumps({"cases": [case.name for case in cases], "harm": harm(world, cases)}))


if __name__ == "__main__":
    command_line(*sys.argv[1:])
