"""The report of a step: phases, bytes, cache, and each tier."""

from __future__ import annotations

import time
from typing import Any

from mlpo_hpc.telemetry.metrics import Figures
from mlpo_hpc.telemetry.trace import Tell


class PhaseClock:
    """Seconds spent in forward and backward since the last step, over all micro-steps.

    On accelerators that run asynchronously these are the seconds until the host got control
    back, which for ZeRO-3 with offload includes the gathering of weights and gradients.
    """

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self.record: Tell | None = None
        """Told of each phase, if there is a trace."""
        self._begin: dict[str, float] = {}

    def start(self, phase: str) -> None:
        """A phase begins."""
        self._begin[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        """A phase ends; nothing if it did not begin."""
        begin = self._begin.pop(phase, None)
        if begin is not None:
            end = time.perf_counter()
            self.seconds[phase] += end - begin
            if self.record is not None:
                self.record(phase, begin, end, 0)

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


class StepReport:
    """Turns totals into the figures of one step."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def build(self, step: int, phases: dict[str, float], update_s: float, totals: dict[str, Any]) -> dict[str, Any]:
        """Report what happened since the last call.

        Parameters
        ----------
        step : int
            Applied optimizer steps up to now.
        phases : dict
            ``forward`` and ``backward`` seconds.
        update_s : float
            Seconds of the optimizer step.
        totals : dict
            ``hits``, ``misses`` and ``tiers`` (name -> ``read``/``write`` -> `Figures`) since the start,
            ``facts`` (name -> what stays the same: ``container``, ``transport``, ``tokens``), and ``memory``.

        Returns
        -------
        dict
            ``step``, ``forward_s``, ``backward_s``, ``update_s``, ``bytes_read``, ``bytes_written``,
            ``cache_hits``, ``cache_misses``; of this rank ``state_bytes`` (all state, as it is stored),
            ``found_bytes`` (what of it was in host memory when the update began), ``reusable_bytes`` (what is
            there at its end) and ``host_bytes`` (the budget); and under ``tiers`` for each tier the bytes, seconds,
            ``wait_s``, ``tokens_taken``, ``container``, ``transport`` and ``tokens``.
        """
        before = self._before or {"hits": 0, "misses": 0, "tiers": {}}
        nothing = {"read": Figures(), "write": Figures()}
        tiers: dict[str, dict[str, Any]] = {}
        for name, now in totals["tiers"].items():
            moved = {way: now[way].since(before["tiers"].get(name, nothing)[way]) for way in now}
            tiers[name] = {**_tier(moved), **totals["facts"][name]}
        report = {
            "step": step,
            "forward_s": phases["forward"],
            "backward_s": phases["backward"],
            "update_s": update_s,
            "bytes_read": sum(tier["bytes_read"] for tier in tiers.values()),
            "bytes_written": sum(tier["bytes_written"] for tier in tiers.values()),
            "cache_hits": totals["hits"] - before["hits"],
            "cache_misses": totals["misses"] - before["misses"],
            **totals["memory"],
            "tiers": tiers,
        }
        self._before = totals
        return report


def _tier(moved: dict[str, Figures]) -> dict[str, float]:
    return {
        "bytes_read": moved["read"].nbytes,
        "bytes_written": moved["write"].nbytes,
        "read_s": moved["read"].busy_s,
        "write_s": moved["write"].busy_s,
        "wait_s": moved["read"].wait_s + moved["write"].wait_s,
        "tokens_taken": moved["read"].taken + moved["write"].taken,
    }
