"""One line a step: loss, text tokens per second, GB/s of each tier, cache hits, time left."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

PHASES = ("forward", "backward", "update")


class StepProgress:
    """Shows the steps of a run, one line each: launchers' terminals and batch logs take nothing livelier.

    Parameters
    ----------
    num_steps : int
        Number of the last step.
    first_step : int
        Steps done before, by the run that this one resumes.
    quiet : bool
        Keep the history, print nothing (other ranks).
    """

    def __init__(self, num_steps: int, first_step: int = 0, quiet: bool = False) -> None:
        self.history: list[dict[str, Any]] = []
        self._num_steps = num_steps
        self._first_step = first_step
        # Launchers give ranks a terminal of their own and write what it shows to files: no colours.
        self._console = Console(quiet=quiet, soft_wrap=True, color_system=None)
        self._begin = self._last = time.perf_counter()

    def step(self, loss: float, text_tokens: int, report: dict[str, Any]) -> None:
        """A step is done.

        Parameters
        ----------
        loss : float
            Mean loss of the step, in nats.
        text_tokens : int
            Tokens of text that all ranks trained on in this step.
        report : dict
            ``engine.optimizer.offload_report()``.
        """
        now = time.perf_counter()
        entry = {"loss": loss, "text_tokens": text_tokens, "iteration_s": now - self._last, **report}
        self._last = now
        self.history.append(entry)
        self._console.print(f"{self._line(entry)}  ETA {self._left()}", highlight=False)

    def _line(self, entry: dict[str, Any]) -> str:
        found = entry["cache_hits"] + entry["cache_misses"]
        tiers = "  ".join(f"{name} {_rate(tier)} GB/s" for name, tier in entry["tiers"].items())
        return (
            f"step {self._first_step + len(self.history)}/{self._num_steps}  loss {entry['loss']:.3f}  "
            f"{entry['text_tokens'] / entry['iteration_s']:,.0f} text tokens/s  {tiers}  "
            f"cache {entry['cache_hits']}/{found}"
        )

    def _left(self) -> str:
        done = len(self.history)
        seconds = (time.perf_counter() - self._begin) / done * (self._num_steps - self._first_step - done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def summary(self) -> None:
        """Print a table of what an iteration took and moved."""
        if not self.history:
            self._console.print(f"nothing to do: step {self._first_step} of {self._num_steps} is reached")
            return
        table = Table(title="a step, on average without the first", title_justify="left")
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in summarise(self.history).items():
            table.add_row(name, value)
        self._console.print(table)


def summarise(history: list[dict[str, Any]]) -> dict[str, str]:
    """Averages over the steps of a run; the first, which still writes the first state, is left out."""
    steps = history[1:] or history

    def mean(key: str) -> float:
        return float(sum(step[key] for step in steps)) / len(steps)

    rows = {"loss, first -> last step": f"{history[0]['loss']:.3f} -> {history[-1]['loss']:.3f}"}
    rows["iteration"] = f"{mean('iteration_s'):.2f} s"
    rows |= {phase: f"{mean(f'{phase}_s'):.2f} s" for phase in PHASES}
    rows["text tokens/s"] = f"{mean('text_tokens') / mean('iteration_s'):,.0f}"
    rows["read / written"] = f"{mean('bytes_read') / 1e6:,.1f} / {mean('bytes_written') / 1e6:,.1f} MB"
    rows["cache hits / misses"] = f"{mean('cache_hits'):.1f} / {mean('cache_misses'):.1f}"
    for name in steps[0]["tiers"]:
        moved = [step["tiers"][name] for step in steps]
        numbers = [key for key, value in moved[0].items() if isinstance(value, int | float)]
        total = {key: sum(tier[key] for tier in moved) for key in numbers}
        taken, wait_s = total["tokens_taken"] / len(steps), total["wait_s"] / len(steps)
        rows[f"tier {name}"] = f"{moved[0]['container']} over {moved[0]['transport']}"
        rows[f"tier {name}, read / write"] = f"{_rate(total)} GB/s"
        rows[f"tier {name}, tokens taken / waited"] = f"{taken:.1f} / {wait_s:.3f} s"
        rows[f"tier {name}, tokens"] = _sharing(moved[0]["tokens"])
    return rows


def _sharing(tokens: dict[str, Any]) -> str:
    """What was decided about turns on a tier, and the rates that decided it."""
    text = f"{tokens['scope']} ({tokens['backend']})"
    if "tier_bps" not in tokens:
        return text
    return (
        f"{text}: all at once {tokens['off_bps'] / 1e9:.2f}, by direction {tokens['direction_bps'] / 1e9:.2f}, "
        f"one rank {tokens['tier_bps'] / 1e9:.2f} GB/s"
    )


def _rate(tier: dict[str, float]) -> str:
    """GB/s of the time in which the tier moved bytes."""
    read = tier["bytes_read"] / tier["read_s"] / 1e9 if tier["read_s"] else 0.0
    write = tier["bytes_written"] / tier["write_s"] / 1e9 if tier["write_s"] else 0.0
    return f"{read:.2f}/{write:.2f}"
