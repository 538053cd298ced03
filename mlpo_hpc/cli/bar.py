"""How many bytes are done: a bar on terminals, a line each tenth elsewhere, such as in the log of a job."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

NUM_LINES = 10


class Bar:
    """Tells on stderr, while it is open.

    Parameters
    ----------
    what : str
        That goes on.
    quiet : bool
        Whether to tell nothing (other ranks).
    """

    def __init__(self, what: str, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._what = what
        self._lines = not quiet and not console.is_terminal
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        shown = not quiet and console.is_terminal
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown)
        self._task = self._progress.add_task(what, total=None)
        self._done_bytes = self._told = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """That many more are done; none: something begins."""
        self._done_bytes = self._done_bytes + done_bytes if done_bytes else 0
        self._progress.update(self._task, completed=self._done_bytes, total=all_bytes)
        tenths = NUM_LINES * self._done_bytes // max(1, all_bytes)
        if self._lines and tenths != self._told:
            self._told = tenths
            if tenths:
                text = f"{self._what}: {100 * tenths // NUM_LINES} % of {decimal(all_bytes)}"
                self._console.print(text, highlight=False, soft_wrap=True)
