"""Progress bars, on standard error, so that standard output stays clean."""

from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from trident.errors import one_line

if TYPE_CHECKING:
    from trident.learning.run_log import Validated


class _Lines(Console):
    """Prints each text in one line. Names of files cannot act on the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(one_line(one) if isinstance(one, str) else one for one in objects), **options)


stderr = _Lines(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """One line on standard error, however long."""
    stderr.print(text, soft_wrap=True)


_PLAIN_LINES = 20  # progress lines of a whole training without a terminal
_PLAIN_SECONDS = 60.0  # between progress lines of other work without a terminal


class _Bar(Progress):
    """One line for the bar, the count and the time left, and one for the numbers: both fit a narrow terminal."""

    def __init__(self) -> None:
        self.numbers = ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=stderr,
            disable=not stderr.is_terminal,
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.numbers:
            yield Text(self.numbers)


class Counter(_Bar):
    """A progress bar for work that can be counted: with Counter("images") as progress."""

    def __init__(self, description: str):
        super().__init__()
        self._bar = self.add_task(description, total=None)
        self._description = description
        self._said = monotonic()

    def resumed(self, done: int, total: int) -> None:
        """Start the bar at `done`, the part that an earlier run did. It does not count towards the speed."""
        say(f"going on after {done} of {total}, which an earlier run has done")
        self.reset(self._bar, completed=done, total=total)

    def __call__(self, done: int, total: int, description: str | None = None) -> None:
        self.update(self._bar, completed=done, total=total, description=description)
        if not stderr.is_terminal and monotonic() - self._said >= _PLAIN_SECONDS:
            self._said = monotonic()
            say(f"{description or self._description}: {done} of {total}")

    def stage(self, name: str, done: int, total: int) -> None:
        self(done, total, name)


class TrainingProgress(_Bar):
    """A bar with loss parts, accuracy and speed, and a line for each validation."""

    def __init__(self, start: int, steps: int):
        super().__init__()
        self._steps = steps
        self._smooth: dict[str, float] = {}
        self._validated = False
        self._bar = self.add_task("training", total=steps, completed=start)

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        if values["left_out"]:
            say(f"step {step}: {values['left_out']:.0f} tasks left out because they were not finite")
        losses = values["losses"]
        for key, value in (values | losses).items():
            if key != "losses":
                self._smooth[key] = 0.95 * self._smooth.get(key, value) + 0.05 * value
        s = self._smooth
        parts = ", ".join(f"{name.replace('_', ' ')} {s[name]:.3g}" for name in losses if name != "total" and s[name])
        self.numbers = f"{1 / s['seconds']:.2f} it/s, accuracy {s['accuracy']:.1f} %, loss {s['total']:.4g}"
        self.numbers += f": {parts}" if parts else ""
        self.update(self._bar, completed=step)
        if not stderr.is_terminal and step % max(1, self._steps // _PLAIN_LINES) == 0:
            say(f"step {step}/{self._steps}: {self.numbers}")

    def on_validation(self, step: int, validated: "Validated", best: bool) -> None:
        if not self._validated:
            say(f"validation: {validated.describe_protocol()}")
            self._validated = True
        best_yet = ", the best so far" if best else ""
        say(f"step {step}: validation {validated.accuracy:.2f} ± {validated.ci95:.2f} %{best_yet}")
