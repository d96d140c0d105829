"""Two commands sort the same pictures at once: after every system call, the content of each picture is somewhere.

The commands are threads that take turns. The first runs up to one of its system calls, then the second runs, and so on.
So every place where one can meet the other is tried, and nothing depends on speed.
"""

import builtins
import errno
import fcntl
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trident import files
from trident.labelling.sorting import carry_out, plan

CALLS = [
    *(
        (os, name)
        for name in ("link", "unlink", "replace", "stat", "lstat", "open", "mkdir", "scandir", "access", "utime")
    ),
    *((io, "open"), (builtins, "open"), (fcntl, "flock")),
]
TO_THE_END = 10_000  # calls


class Command(NamedTuple):
    label: str = "cat"
    target: str = "sorted"
    moving: bool = True


class Volume(NamedTuple):
    """What the file system has, and who uses it."""

    links: bool = True
    locks: bool = True
    machines: int = 1
    old: bool = False  # whether temporary files seem to be a day old at once


class Killed(BaseException):
    """Nothing that the command does after this has an effect."""


class Turns:
    """Which command runs: `turns` has the number of a command and how many system calls it makes, again and again."""

    def __init__(self, turns: list[tuple[int, int]], killed_at: int | None):
        self.turns, self.killed_at = turns, killed_at  # the call of the first command
        self.calls, self.ended = [0, 0], [False, False]
        self.changed = threading.Condition()

    def take(self, number: int) -> None:
        """Wait for the turn of this command, and count one call."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._next() == number, 60)
            if number == 0 and self.calls[0] == self.killed_at:
                raise Killed
            self.calls[number] += 1
            if self.turns:
                self.turns[0] = (number, self.turns[0][1] - 1)
            self.changed.notify_all()

    def end(self, number: int) -> None:
        with self.changed:
            self.ended[number] = True
            self.changed.notify_all()

    def _next(self) -> int:
        while self.turns and (self.turns[0][1] == 0 or self.ended[self.turns[0][0]]):
            self.turns.pop(0)
        return self.turns[0][0] if self.turns else int(self.ended[0])


def sort_at_once(
    folder: Path,
    commands: tuple[Command, Command],
    volume: Volume,
    turns: list[tuple[int, int]],
    killed_at: int | None = None,
) -> int:
    """How many system calls the first one makes."""
    source = folder / "pile" / "x.jpg"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"picture" * 10)
    case = (commands, volume, list(turns), killed_at)
    schedule, me, problems = Turns(turns, killed_at), threading.local(), []

    def nothing_is_lost() -> None:
        found = [Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".jpg")]
        contents = {path.read_bytes() for path in found}
        assert b"picture" * 10 in contents, case
        # Without links a name is taken by an empty file before it gets its content.
        assert contents <= {b"picture" * 10, b"" if not volume.links else b"picture" * 10}, case

    def sort(command: Command) -> None:
        carry_out(
            plan({source: command.label}, folder / command.target, command.moving),
            folder / command.target,
            command.moving,
        )

    def run(number: int) -> None:
        me.number = number
        try:
            sort(commands[number])
        except Killed:
            pass
        except BaseException as error:
            problems.append(error)
        finally:
            del me.number
            schedule.end(number)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            number = me.__dict__.pop("number", None)  # so that calls of calls are not counted
            if number is None:
                return real(*arguments, **options)
            try:
                schedule.take(number)
                if name == "link" and not volume.links:
                    raise PermissionError(errno.EPERM, "Operation not permitted")
                if name == "flock" and not volume.locks:
                    raise OSError(errno.ENOLCK, "No locks available")
                result = real(*arguments, **options)
                if name in ("unlink", "replace"):
                    nothing_is_lost()
                return result
            finally:
                me.number = number

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, watched(name, getattr(owner, name)))
        patch.setattr(files, "_this_machine", lambda: f"{me.__dict__.get('number', 0) % volume.machines:08x}")
        patch.setattr(os, "fsync", lambda _: None)  # takes milliseconds
        if volume.old:
            patch.setattr(files, "_DAY", -1)
        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not problems, (case, problems)
        nothing_is_lost()
        if killed_at is not None:
            sort(Command())
            nothing_is_lost()
    return schedule.calls[0]


def pairs() -> Iterator[tuple[Command, Command]]:
    first = Command()
    for second in (first, Command("dog"), Command(target="other"), Command(moving=False)):
        yield first, second
    yield Command(moving=False), first


VOLUMES = [Volume(), Volume(links=False, locks=False, machines=2, old=True)]
MORE_VOLUMES = [Volume(links=False), Volume(locks=False, machines=2), Volume(links=False, machines=2, old=True)]


@pytest.mark.parametrize("volume", VOLUMES, ids=str)
def test_at_every_system_call_of_one_command_the_other_runs_whole(tmp_path: Path, volume: Volume) -> None:
    for number, commands in enumerate(pairs()):
        for calls in count():
            made = sort_at_once(tmp_path / f"{number}-{calls}", commands, volume, [(0, calls), (1, TO_THE_END)])
            if made <= calls:
                break


@pytest.mark.parametrize("volume", VOLUMES, ids=str)
def test_a_move_that_is_killed_at_any_system_call_is_finished(tmp_path: Path, volume: Volume) -> None:
    for calls in count():
        folder = tmp_path / str(calls)
        made = sort_at_once(folder, (Command(), Command("dog")), volume, [(0, calls + 1), (1, TO_THE_END)], calls)
        found = [path for path in folder.rglob("*") if path.is_file()]
        assert "pile" not in {path.parent.name for path in found}
        assert not volume.links or len(found) == 1, (calls, found)
        if made < calls:
            break


@pytest.mark.soak
@pytest.mark.parametrize("volume", [*VOLUMES, *MORE_VOLUMES], ids=str)
def test_each_command_stops_at_every_system_call_for_the_other(tmp_path: Path, volume: Volume) -> None:
    """The first stops, then the second, then the first goes on to its end, then the second."""
    for number, commands in enumerate(pairs()):
        n_first = sort_at_once(tmp_path / f"{number}", commands, volume, [])
        n_second = sort_at_once(tmp_path / f"{number}-other", (commands[1], commands[0]), volume, [])
        for first, second in product(range(n_first + 1), range(n_second + 1)):
            folder = tmp_path / f"{number}-{first}-{second}"
            sort_at_once(folder, commands, volume, [(0, first), (1, second), (0, TO_THE_END)])
            shutil.rmtree(folder)
