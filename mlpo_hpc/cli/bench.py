"""``mlpo bench``: this library beside stock DeepSpeed, on the same storage, in turns."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlpo_hpc.cli.bench_checkpoint import checkpoint
from mlpo_hpc.errors import MlpoError

if TYPE_CHECKING:
    from mlpo_hpc.bench.conditions import BenchTier, Conditions
    from mlpo_hpc.bench.result import Outcome
    from mlpo_hpc.bench.testbed import CappedDisk

EXAMPLES = """
\b
Examples:
  mlpo bench --testbed nvme=200,pfs=100 --quick     as root: two disks of 200 and 100 MB/s each way
  mlpo bench nvme=/local/scratch pfs=$SCRATCH/run --host-memory 8GB --hidden 4096 --sub-group-size 7e7
  mlpo bench /local/a /local/b --systems paper,ours --json result.json
  mlpo bench checkpoint --help                      what a checkpoint beside training costs
"""
USUAL = "training"
DISK_SLACK = 1.1
DISK_SLACK_BYTES = 100_000_000
"""Of a disk, for its file system and its journal."""


def read_size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Bytes."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return None if text is None else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise click.BadParameter(f"{text!r} is no size, such as 268MB or 2GiB") from None


def read_caps(_: click.Context, __: click.Parameter, text: str | None) -> dict[str, int] | None:
    """Bytes per second by name."""
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name.isidentifier() and rate.isdigit() and int(rate) for name, _, rate in pairs):
        raise click.BadParameter(f"{text!r} must be like nvme=200,pfs=100 (MB/s)")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise click.BadParameter("two disks have one name")
    return {name: int(rate) * 10**6 for name, _, rate in pairs}


def _names(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """In the order of the list of all systems."""
    from mlpo_hpc.bench.systems import SYSTEMS

    asked = set(text.split(",")) if text is not None else set()
    if unknown := sorted(asked - set(SYSTEMS)):
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return tuple(name for name in SYSTEMS if name in asked) or None


def _counts(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Ascending, each once."""
    numbers = text.split(",") if text is not None else []
    if not all(number.isdigit() and int(number) for number in numbers):
        raise click.BadParameter(f"{text!r} must be like 1,8")
    return tuple(sorted({int(number) for number in numbers})) or None


class _WithUsual(click.Group):
    """A group whose usual command needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [USUAL, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_WithUsual)
def bench() -> None:
    """Measure this library beside stock DeepSpeed, or its checkpoints, on the same storage."""


@bench.command(USUAL, epilog=EXAMPLES)
@click.argument("directories", nargs=-1, metavar="[NAME=]DIR ...")
@click.option(
    "--testbed", callback=read_caps, metavar="NAME=MB/S,...", help="Make disks with this speed instead (root)."
)
@click.option("--no-tiers", is_flag=True, help="Host memory only: ours beside stock CPU offload.")
@click.option(
    "--systems",
    callback=_names,
    metavar="NAME,...",
    help="nvme,cpu,paper-1,paper-2,paper-3,paper,ours; default: all that fit.",
)
@click.option("--quick", is_flag=True, help="nvme, cpu, paper and ours only, one micro-batch an iteration.")
@click.option(
    "--ga", "accumulations", callback=_counts, metavar="N,...", help="Micro-batches an iteration.  [default: 1,8]"
)
@click.option("--iterations", type=click.IntRange(1), default=6, show_default=True, help="Counted, at least.")
@click.option("--blocks", type=click.IntRange(1), default=8, show_default=True, help="Residual blocks of the model.")
@click.option("--hidden", type=click.IntRange(8), default=1024, show_default=True, help="Width of the model.")
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Rows of a micro-batch.")
@click.option("--sub-group-size", type=click.FloatRange(1), default=4e6, show_default=True, help="Parameters.")
@click.option("--host-memory", callback=read_size, metavar="BYTES", help="Of the node, each system.  [default: 268MB]")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of each system.")
@click.option("--compile-timeout", type=click.FloatRange(1), default=1800, show_default=True, help="Seconds.")
@click.option("--json", "json_file", metavar="FILE", help="Write all samples there; '-': to stdout, without tables.")
@click.option("--picture", type=click.Path(file_okay=False), help="Write bench.png and timeline.png into this folder.")
def training(
    directories: tuple[str, ...],
    testbed: dict[str, int] | None,
    no_tiers: bool,
    json_file: str | None,
    picture: str | None,
    compile_timeout: float,
    systems: tuple[str, ...] | None,
    **wishes: Any,
) -> None:
    """Measure ours, the paper's policies and stock DeepSpeed in turns: same model, data, host memory and storage.

    Give a directory on each storage, the fastest first; nothing is left behind there.
    """
    if (bool(directories), testbed is not None, no_tiers).count(True) != 1:
        raise click.UsageError("give either directories, or --testbed, or --no-tiers")
    quick = wishes.pop("quick")
    chosen = systems or _usual_systems(quick, no_tiers)
    if no_tiers and (misfits := [name for name in chosen if name not in ("cpu", "ours")]):
        raise click.UsageError(f"{', '.join(misfits)} need a tier")
    look_at_outputs(json_file)
    conditions = _conditions(read_tiers(directories, testbed), quick, **wishes)
    try:
        with undone_on_signals():
            outcome = _measure(conditions, chosen, testbed, compile_timeout)
    except (MlpoError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _tell(outcome, json_file, picture)


def look_at_outputs(json_file: str | None) -> None:
    """What cannot be written is said before the measurement, not after it."""
    if json_file not in (None, "-"):
        folder = Path(str(json_file)).absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise click.ClickException(f"{json_file} cannot be written: {folder} is missing or not writable")


def _usual_systems(quick: bool, no_tiers: bool) -> tuple[str, ...]:
    from mlpo_hpc.bench.systems import QUICK, SYSTEMS, WITHOUT_TIERS

    if no_tiers:
        return WITHOUT_TIERS
    return QUICK if quick else tuple(SYSTEMS)


def read_tiers(directories: tuple[str, ...], caps: dict[str, int] | None) -> tuple[BenchTier, ...]:
    """Those given; those of a test bed have no directory yet."""
    from mlpo_hpc.bench.conditions import BenchTier

    pairs = [text.partition("=") if "=" in text else (f"tier{i}", "=", text) for i, text in enumerate(directories)]
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise click.UsageError("two directories have one name")
    given = [BenchTier(name, os.path.abspath(directory)) for name, _, directory in pairs]
    return (*given, *(BenchTier(name, "") for name in caps or ()))


def _conditions(
    tiers: tuple[BenchTier, ...],
    quick: bool,
    host_memory: int | None,
    sub_group_size: float,
    accumulations: tuple[int, ...] | None,
    **sizes: Any,
) -> Conditions:
    from mlpo_hpc.bench.conditions import USUAL_HOST_BYTES, Conditions

    return Conditions(
        tiers,
        host_memory_bytes=host_memory or (USUAL_HOST_BYTES if tiers else None),
        sub_group_size=int(sub_group_size),
        accumulations=accumulations or ((1,) if quick else (1, 8)),
        facts=facts(),
        **sizes,
    )


def facts() -> dict[str, Any]:
    """Of this machine."""
    import platform
    from importlib.metadata import version

    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed")},
    }


def _measure(
    conditions: Conditions, systems: tuple[str, ...], caps: dict[str, int] | None, compile_timeout_s: float
) -> Outcome:
    """In a test bed if one is wished for; it is undone at the end."""
    from mlpo_hpc.bench.progress import Display
    from mlpo_hpc.bench.session import Session, check

    check(conditions, systems)
    with Display() as display, laid_out(conditions, systems, caps) as (complete, _):
        return Session(complete, systems, compile_timeout_s, display).run()


@contextmanager
def laid_out(
    conditions: Conditions, systems: tuple[str, ...], caps: dict[str, int] | None
) -> Iterator[tuple[Conditions, dict[str, CappedDisk]]]:
    """With a directory for each tier, and the disks of a test bed."""
    from mlpo_hpc.bench.room import tier_bytes
    from mlpo_hpc.bench.testbed import capped_disks
    from mlpo_hpc.storage.folder import private_folder

    if caps is None:
        yield conditions, {}
        return
    sizes = {
        name: int(DISK_SLACK * needed) + DISK_SLACK_BYTES for name, needed in tier_bytes(conditions, systems).items()
    }
    with (
        private_folder(tempfile.gettempdir()) as folder,
        capped_disks(Path(folder), caps, sizes) as disks,
    ):
        tiers = tuple(dataclasses.replace(tier, dir=str(disks[tier.name].path)) for tier in conditions.tiers)
        yield dataclasses.replace(conditions, tiers=tiers, facts=conditions.facts | {"caps_bps": caps}), disks


@contextmanager
def undone_on_signals() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, and once that began neither disturbs it."""

    def unwind(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(outcome: Outcome, json_file: str | None, picture: str | None) -> None:
    """Tables, JSON and pictures, as wished."""
    from mlpo_hpc.bench.result import plain
    from mlpo_hpc.bench.table import show

    if json_file is not None:
        text = json.dumps(plain(outcome), indent=1)
        if json_file == "-":
            click.echo(text)
        else:
            Path(json_file).write_text(text + "\n")
    if json_file != "-":
        show(outcome)
    if picture is not None:
        from mlpo_hpc.bench.picture import draw_bench, draw_timeline

        folder = Path(picture)
        folder.mkdir(parents=True, exist_ok=True)
        draw_bench(outcome, folder / "bench.png")
        draw_timeline(outcome, folder / "timeline.png")


bench.add_command(checkpoint)
