"""A finding: what was looked at, what was seen, what to do; and many nodes' findings as few lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from mlpo_hpc.errors import here

Check = Literal[
    "configuration",
    "versions",
    "compile locks",
    "launcher",
    "nodes",
    "network",
    "pmi",
    "mpi",
    "thread level",
    "h5py",
    "gpu",
    "cores",
    "memory",
    "memlock",
    "/dev/shm",
    "tier",
    "direct I/O",
    "striping",
    "sharing",
    "space",
]
"""Everything that is looked at, in the order of a report."""

Verdict = Literal["fail", "warn", "skipped", "ok"]
"""``fail``: training will fail, or hang; ``warn``: it will be slow, or may fail; worst first."""

CHECKS: tuple[Check, ...] = get_args(Check)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class Finding(BaseModel):
    """What one check found on one node.

    Parameters
    ----------
    check : str
        One of `CHECKS`.
    verdict : str
        One of `VERDICTS`.
    seen : str
        What was seen, or why nothing was looked at.
    advice : str
        What to do; a bad finding has some.
    subject : str
        Name of the tier, where there are several.
    """

    model_config = ConfigDict(frozen=True)

    check: Check
    verdict: Verdict
    seen: str
    advice: str = ""
    subject: str = ""

    @model_validator(mode="after")
    def _says_what_to_do(self) -> Finding:
        if self.verdict in ("fail", "warn") and not self.advice:
            raise ValueError(f"finding {self.check!r} does not say what to do")
        return self


class Merged(BaseModel):
    """One finding of several nodes."""

    model_config = ConfigDict(frozen=True)

    check: Check
    subject: str
    verdict: Verdict
    hosts: list[str]
    seen: dict[str, list[str]]
    """What was seen, and on which hosts; the most frequent first. No host: on the whole job."""
    advice: str

    @property
    def name(self) -> str:
        """Of the check and its subject."""
        return f"{self.check} {self.subject}".rstrip()


def merge(found: Iterable[tuple[str, Finding]]) -> list[Merged]:
    """Findings of all hosts, worst first: those that ask for the same are one.

    Parameters
    ----------
    found : iterable of (str, Finding)
        Host and what was found there; no host: it concerns the whole job.
    """
    groups: dict[tuple[Check, str, Verdict, str], dict[str, list[str]]] = {}
    for host, finding in found:
        seen = groups.setdefault((finding.check, finding.subject, finding.verdict, finding.advice), {})
        on = seen.setdefault(finding.seen, [])
        on += [host] if host not in on else []
    merged = []
    for (check, subject, verdict, advice), seen in groups.items():
        by_count = dict(sorted(seen.items(), key=lambda entry: -len(entry[1])))
        hosts = sorted({host for theirs in seen.values() for host in theirs if host})
        merged.append(Merged(check=check, subject=subject, verdict=verdict, hosts=hosts, seen=by_count, advice=advice))
    return sorted(merged, key=lambda line: (VERDICTS.index(line.verdict), CHECKS.index(line.check), line.subject))


def split_advice(text: str) -> tuple[str, str]:
    """An error's message as what was seen and what to do: its first sentence, and the rest.

    Hosts are left out: they are named beside a finding, once for all that say the same.
    """
    plain = " ".join(text.split()).replace(f"{here()}, ", "").replace(here(), "this node")
    seen, _, advice = plain.partition(". ")
    return seen, advice.removeprefix("What to do: ")
