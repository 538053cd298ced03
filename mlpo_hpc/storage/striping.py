"""Lustre striping of a directory: what is wanted, set by ``lfs``, read back and compared.

A layout is fixed when a file's first object is made, and new files take their directory's: so it is
set on directories, before anything is made in them. Options and output are those of
lfs-setstripe(1) and lfs-getstripe(1).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from mlpo_hpc.cluster.sites import Purpose, Site
from mlpo_hpc.config import Stripes, Striping
from mlpo_hpc.errors import StorageError, here
from mlpo_hpc.storage.base import round_up
from mlpo_hpc.telemetry.log import logger

LFS_TIMEOUT_S = 60.0
ALL_OSTS = -1
SMALLEST_SIZE_BYTES = 65536
LEAST_ALIGNMENT_BYTES = 2**20
MOST_ALIGNMENT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Component:
    """Stripes of one extent of a file.

    Parameters
    ----------
    count : int
        Stripes; -1: one on every storage target.
    size_bytes : int, optional
        Bytes on one stripe before the next; None: the file system's default.
    pool : str, optional
        Storage targets to take.
    end_bytes : int, optional
        Where the extent ends; None: with the file.
    overstripe : bool
        Whether a target may take several stripes.
    """

    count: int
    size_bytes: int | None = None
    pool: str | None = None
    end_bytes: int | None = None
    overstripe: bool = False

    def arguments(self, with_end: bool) -> list[str]:
        """Options of ``lfs setstripe``."""
        end = ["-E", str(self.end_bytes or -1)] if with_end else []
        count = ["-C" if self.overstripe else "-c", str(self.count)]
        size = ["-S", str(self.size_bytes)] if self.size_bytes else []
        return [*end, *count, *size, *(["-p", self.pool] if self.pool else [])]


@dataclass(frozen=True)
class StripeLayout:
    """Stripes of a whole file: one component, or several for a progressive layout."""

    components: tuple[Component, ...]

    def arguments(self) -> list[str]:
        """Options of ``lfs setstripe``."""
        progressive = len(self.components) > 1
        return [word for component in self.components for word in component.arguments(progressive)]

    def hints(self) -> dict[str, str]:
        """The same as hints for MPI-IO, as far as those can say it: one component, no pool (MPI 4.1, 14.2.8)."""
        first = self.components[0]
        if len(self.components) > 1 or first.pool or first.overstripe:
            return {}
        size = {"striping_unit": str(first.size_bytes)} if first.size_bytes else {}
        return {"striping_factor": str(first.count), **size}

    def __str__(self) -> str:
        return " ".join(self.arguments())

    def grants(self, wanted: StripeLayout) -> bool:
        """Whether this layout, as read back, is the wanted one in all that was asked for."""
        pairs = zip(self.components, wanted.components, strict=False)
        return len(self.components) == len(wanted.components) and all(_grants(has, asked) for has, asked in pairs)


def _grants(has: Component, asked: Component) -> bool:
    return (
        (has.count, has.end_bytes, has.overstripe) == (asked.count, asked.end_bytes, asked.overstripe)
        and asked.size_bytes in (None, has.size_bytes)
        and asked.pool in (None, has.pool)
    )


def explicit_layout(striping: Striping) -> StripeLayout:
    """The layout that a configuration spells out."""
    if striping.components is None:
        return StripeLayout((_component(striping, None),))
    return StripeLayout(tuple(_component(extent, extent.end) for extent in striping.components))


def _component(stripes: Stripes, end: int | None) -> Component:
    count = ALL_OSTS if stripes.count is None else stripes.count
    size = None if stripes.size is None else int(stripes.size)
    return Component(count, size, stripes.pool, None if end is None else int(end), stripes.overstripe)


def wanted_layout(
    striping: Striping, purpose: Purpose, num_nodes: int, site: Site | None
) -> tuple[StripeLayout | None, str]:
    """What a policy means here, and why; None: touch nothing."""
    if striping.policy == "inherit":
        return None, "policy 'inherit'"
    if striping.policy == "explicit":
        return explicit_layout(striping), "as configured"
    if site is None:
        return rule_layout(purpose, num_nodes), "our rule for Lustre, there is no profile of this site"
    theirs = site.striping(purpose)
    layout = explicit_layout(theirs) if theirs.policy == "explicit" else None
    return layout, f"the profile of {site.name}: {site.source}"


def rule_layout(purpose: Purpose, num_nodes: int) -> StripeLayout:
    """What suits Lustre where no site profile says otherwise.

    Parameters
    ----------
    purpose : str
        ``state``: large files that one node writes each: 4 stripes, for a client gains from 4-8 and each
        stripe more costs locks. ``wide``: one file that many nodes write: 2 stripes a node, 8 to 64.
    num_nodes : int
        Nodes that write.

    Notes
    -----
    After "Striping Best Practices" of the Lustre wiki (2026) and the guides of the sites in ``sites.toml``.
    """
    if purpose == "state":
        return StripeLayout((Component(4, 4 * 2**20),))
    return StripeLayout((Component(min(64, max(8, 2 * num_nodes)), 16 * 2**20),))


def set_layout(directory: str, layout: StripeLayout) -> StripeLayout:
    """Set a directory's layout for new files; return what was granted.

    Raises
    ------
    StorageError
        If ``lfs`` is missing or fails.
    """
    _lfs("setstripe", *layout.arguments(), directory)
    return get_layout(directory)


def get_layout(directory: str) -> StripeLayout:
    """A directory's layout for new files.

    Raises
    ------
    StorageError
        If ``lfs`` is missing or fails, or says what cannot be read.
    """
    text = _lfs("getstripe", "-d", directory)
    layout = parse_layout(text)
    if not layout.components:
        raise StorageError(f"cannot read the answer of 'lfs getstripe -d {directory}' on {here()}:\n{text}")
    return layout


def file_alignment_bytes(directory: str, is_lustre: bool) -> int:
    """Where large pieces of new files should begin: on a stripe of Lustre, on a block elsewhere; 1 to 64 MiB."""
    unit_bytes = os.stat(directory).st_blksize  # Storage Scale tells its block size
    if is_lustre:
        try:
            sizes = [component.size_bytes or 0 for component in get_layout(directory).components]
            unit_bytes = max(unit_bytes, *sizes)
        except (StorageError, OSError, subprocess.SubprocessError) as error:
            logger.info("the stripe size of %s is not known: %s", directory, error)
    return min(MOST_ALIGNMENT_BYTES, round_up(unit_bytes, LEAST_ALIGNMENT_BYTES))


def parse_layout(text: str) -> StripeLayout:
    """Read what ``lfs getstripe -d`` prints, in its plain and its YAML form."""
    extents = re.split(r"lcme_extent\.e_end:", text)
    if len(extents) == 1:
        return StripeLayout(tuple(_components(text, None)))
    found = []
    for extent in extents[1:]:
        end = extent.split()[0]
        found += _components(extent, None if end in ("EOF", "-1") else int(end))
    return StripeLayout(tuple(found))


def _components(text: str, end_bytes: int | None) -> list[Component]:
    values = dict(re.findall(r"(?:lmm_)?(stripe_count|stripe_size|pattern|pool):[ \t]*([^\s]+)", text))
    if "stripe_count" not in values:
        return []
    count = int(values["stripe_count"])
    every = count in (0xFFFF, 0xFFFFFFFF)  # older versions print -1 unsigned
    return [
        Component(
            ALL_OSTS if every else count,
            int(values.get("stripe_size", 0)) or None,
            values.get("pool"),
            end_bytes,
            "overstriped" in values.get("pattern", ""),
        )
    ]


def has_lfs() -> bool:
    """Whether Lustre's tool is at hand."""
    return shutil.which("lfs") is not None


def _lfs(*arguments: str) -> str:
    program = shutil.which("lfs")
    if program is None:
        raise StorageError(f"there is no 'lfs' on PATH on {here()}: load Lustre's tools, or set the striping by hand")
    # Without closing files Python starts it by posix_spawn, which network libraries stand after MPI_Init, unlike fork.
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, close_fds=False, timeout=LFS_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        raise StorageError(f"'lfs {' '.join(arguments)}' failed with {done.returncode} on {here()}: {text}")
    return done.stdout
