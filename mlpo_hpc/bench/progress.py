"""How far a benchmark is: a bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

Key = tuple[str, int]
"""System and accumulation of a turn."""


class Expectation:
    """How long turns that are still to come will take, by those that were.

    Parameters
    ----------
    plan : sequence of Key
        All turns, in order.
    """

    def __init__(self, plan: Sequence[Key]) -> None:
        self._left = list(plan)
        self._seconds: dict[Key, float] = {}

    def done(self, key: Key, seconds: float) -> None:
        """The next turn took that long."""
        self._left.remove(key)
        self._seconds[key] = seconds

    def left_s(self) -> float | None:
        """Seconds to come; None as long as nothing is known."""
        if not self._seconds:
            return None
        usual_s = statistics.fmean(self._seconds.values())
        return sum(self._seconds.get(key, usual_s) for key in self._left)


class Display:
    """Tells on stderr what goes on."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("starting", total=None, left="")
        self._expectation = Expectation([])

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def plan(self, turns: Sequence[Key]) -> None:
        """What will be measured."""
        self._expectation = Expectation(turns)
        self._progress.update(self._task, total=len(turns), completed=0)

    @contextmanager
    def turn(self, key: Key, what: str) -> Iterator[None]:
        """A turn of the plan goes on."""
        if self._console.is_terminal:
            self._progress.update(self._task, description=what)
        else:
            self.say(what + self._left())
        begin = time.monotonic()
        yield
        self._expectation.done(key, time.monotonic() - begin)
        self._progress.update(self._task, advance=1, left=self._left())

    def _left(self) -> str:
        seconds = self._expectation.left_s()
        return "" if seconds is None else f", about {int(seconds) // 60}:{int(seconds) % 60:02d} left"
