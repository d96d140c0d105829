"""The command itself, which the other files of this package add their commands to, and how it ends."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trident.errors import TridentError

# In the order in which one comes to need them.
ORDER = (
    *("predict", "web", "weights"),
    *("methods", "recipes", "params", "train", "evaluate"),
    *("audit", "calibrate", "decoupling", "reconstructions", "report", "compare", "ablate"),
    *("paper", "data", "export", "bench"),
)


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=_InOrder,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Few-shot image classification with TRIDENT and other methods.\n\n"
    "Try it:  trident train glyphs --out runs/first   then   trident evaluate runs/first",
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare datasets, look into them.")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Time this machine: training and evaluation, each against a plain task-after-task loop, and labelling.",
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command; a mistake of the user's is one line on standard error and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TridentError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("trident: stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        # Told apart by name and shape, since where these classes live differs between versions and torch loads late.
        if type(error).__name__ == "OutOfMemoryError":
            _fail("out of memory: compute fewer tasks at once, with training.tasks_per_chunk or --tasks-per-chunk")
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(0)
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def _fail(message: str) -> None:
    print(f"trident: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        import trident

        print(trident.__version__)
        raise typer.Exit
