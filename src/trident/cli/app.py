"""The `trident` command and its error handling. The other files of this package add the subcommands."""

import os
import re
import shlex
import signal
import sys
import time
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trident.allocator import keep_freed_memory
from trident.distributed.torchrun import launched
from trident.errors import LostProcessError, TridentError, one_line

GROUPS = {  # as --help shows them
    "Label pictures": ("predict", "sort", "fit", "suggest", "web"),
    "Train and measure": ("train", "evaluate", "report", "recipes"),
    "Compare": ("methods", "leaderboard", "compare", "ablate"),
    "Weights and data": ("weights", "backbones", "data", "export"),
}
IN_A_CLONE = "run 'python -m studies.{}' in the top folder of a clone of the repository"
STUDIES = {
    "bench": "speed",
    "paper": "reproduction.paper",
    "reproduce": "reproduction",
    "leaderboard write": "leaderboard",
}
MOVED = {  # commands of before: what does the same now, where {} stands for their arguments, by default a run
    "audit": "evaluate {} --also audit",
    "calibrate": "evaluate {} --also calibration",
    "decoupling": "evaluate {} --also decoupling",
    "reconstructions": "evaluate {} --also reconstructions",
    "params": "recipes {}",
    "cache": "data cache {}",
}
DEFAULTS = {"params": "NAME", "cache": ""}
SORTING = ("--copy", "--move", "--yes")  # options that 'trident predict' had
DISTRIBUTED = ("train", "evaluate")  # the commands that work on several processes
PATIENCE = 10.0  # seconds that a failed process waits for torchrun to end it


class _Commands(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                width = formatter.width - 6 - max(map(len, self.commands))
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args:
            _check_moved(*args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would exit without a word
            _say_stopped()
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Few-shot image classification with TRIDENT and other methods.\n\n"
    "Try it:  trident train glyphs --out runs/first   then   trident evaluate runs/first",
)
data_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Prepare and inspect datasets and cached features."
)
app.add_typer(data_app, name="data")
leaderboard_app = typer.Typer(rich_markup_mode=None)
app.add_typer(leaderboard_app, name="leaderboard", short_help="Compare all methods on the same tasks.")


def main(command: typer.Typer = app) -> None:
    """Run a command. A user error prints one line on standard error and exits with code 2."""
    keep_freed_memory()
    try:
        _check_outputs()
        _check_arguments()
        sys.exit(command(standalone_mode=False) or 0)
    except TridentError as error:
        _fail(str(error), error.shared, ends_all=not isinstance(error, LostProcessError))
    except KeyboardInterrupt:  # before the command has begun
        _say_stopped()
        sys.exit(130)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        # Checked by name: the modules of these classes differ between versions, and torch may not be imported yet.
        if type(error).__name__ == "OutOfMemoryError":
            _fail("out of memory: compute fewer tasks at once, with training.tasks_per_chunk or --tasks-per-chunk")
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(0)
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def _check_moved(name: str, *arguments: str) -> None:
    """Say what to type instead of a command or an option of before."""
    study = next((one for one in (name, " ".join([name, *arguments[:1]])) if one in STUDIES), None)
    if study:
        raise TridentError(f"'trident {study}' is no longer a command: {IN_A_CLONE.format(STUDIES[study])}")
    if name in MOVED:
        now = " ".join(["trident", MOVED[name].format(shlex.join(arguments) or DEFAULTS.get(name, "RUN"))])
        raise TridentError(f"'trident {name}' is no longer a command, type: {now}")
    old = next((one for one in SORTING if any(one == word.partition("=")[0] for word in arguments)), None)
    if name == "predict" and old:
        move = " --move" if old == "--move" else ""
        raise TridentError(
            f"'trident predict' no longer has {old}: write the table with --out labels.csv, then type: "
            f"trident sort labels.csv --to DIR{move}"
        )


def _say_stopped() -> None:
    if _is_first():
        print("trident: stopped", file=sys.stderr)


def _fail(message: str, shared: bool = False, ends_all: bool = True) -> None:
    """Print the error in one line and exit with code 2.

    `shared`: all processes of torchrun fail with this message, so the first alone prints it. `ends_all`: the end of
    the first makes torchrun end the others.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported if this process has not met the others
    if not shared and not (distributed and distributed.is_initialized()):
        # Only the arguments are known yet, and they are wrong in all processes: one line for each machine.
        place = launched()
        shared = place is not None and place.local_rank > 0
    if not shared or _is_first():
        print(f"trident: error: {one_line(message.strip())}", file=sys.stderr, flush=True)
    elif ends_all:
        # If this process ended now, torchrun would end the first one, perhaps before it has printed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
        time.sleep(PATIENCE)
    sys.exit(2)


def _check_outputs() -> None:
    """Refuse a closed output (`>&-` in a shell): the next file opened would get what is meant for it."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end
    if sys.stdout is None:
        raise TridentError("standard output is closed: write >/dev/null instead of >&- if you do not need it")


def _check_arguments() -> None:
    """Refuse empty ones: as a path they would mean the working directory."""
    for before, word in pairwise(sys.argv):
        if not word or re.fullmatch("--[a-z-]+=", word):
            raise TridentError(f"there is nothing after {word or before}: is a variable of the shell not set?")


def _is_first() -> bool:
    place = launched()
    return place is None or place.rank == 0


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    command = context.invoked_subcommand
    if launched() is not None and command not in (None, *DISTRIBUTED):
        raise TridentError(
            f"'trident {command}' works in one process: start it without torchrun "
            f"(on several: {', '.join(DISTRIBUTED)})"
        )
    if version:
        import trident

        print(trident.__version__)
        raise typer.Exit
