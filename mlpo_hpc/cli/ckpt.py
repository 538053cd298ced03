"""``mlpo ckpt``: list, verify and export checkpoints of our own format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlpo_hpc.cli.bench import undone_on_signals
from mlpo_hpc.errors import CorruptState, MlpoError, storage_error

if TYPE_CHECKING:
    from mlpo_hpc.checkpoint.listing import Listed, Listing
    from mlpo_hpc.checkpoint.read import Reader
    from mlpo_hpc.checkpoint.structure import Fault, Outline
    from mlpo_hpc.cluster.crowd import Ranks

LIST_EXAMPLES = """
\b
Examples:
  mlpo ckpt list $SCRATCH/run/checkpoints
  mlpo ckpt list $SCRATCH/run/checkpoints --json
"""
VERIFY_EXAMPLES = """
\b
Examples:
  mlpo ckpt verify $SCRATCH/run/checkpoints                      the one that would be loaded
  mlpo ckpt verify $SCRATCH/run/checkpoints/global_step1000 --threads 16
"""
EXPORT_EXAMPLES = """
\b
Examples:
  mlpo ckpt export $SCRATCH/run/checkpoints model --to safetensors                   16-bit weights
  mlpo ckpt export $SCRATCH/run/checkpoints/global_step1000 model --to safetensors --type fp32
  srun -n8 mlpo ckpt export $SCRATCH/run/checkpoints state.h5 --to hdf5              8 tasks share the work
  mlpo ckpt export $SCRATCH/run/checkpoints universal/global_step1000 --to universal
"""
TYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
SHOWN_FAULTS = 20
SHOWN_NAMES = 5
WIDTH = 120


@click.group()
def ckpt() -> None:
    """List, verify and export checkpoints that training with mlpo_hpc saved."""


# ---- list -----------------------------------------------------------------------------------


@ckpt.command("list", epilog=LIST_EXAMPLES)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(directory: Path, as_json: bool) -> None:
    """Show the checkpoints in DIRECTORY, and which would be loaded.

    State itself is not read (`verify` does). Exit code 1 if there is none to load, one is damaged, or the file
    'latest' names none.
    """
    from mlpo_hpc.checkpoint.listing import list_checkpoints

    found = _told(lambda: list_checkpoints(directory))
    click.echo(json.dumps(asdict(found), indent=1)) if as_json else _show_list(found)
    damaged = any(each.state == "damaged" for each in found.checkpoints)
    sys.exit(1 if damaged or found.warning or found.latest is None else 0)


def _show_list(found: Listing) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tag", "step", "saved", "ranks", "parameters", "size", "state"):
        table.add_column(name, justify="left" if name in ("tag", "saved", "state") else "right", no_wrap=True)
    for each in found.checkpoints:
        table.add_row(*_row(each, found.latest, decimal(each.nbytes)))
    if found.checkpoints:
        Console(color_system=None, width=None if sys.stdout.isatty() else WIDTH).print(table)
    for each in found.checkpoints:
        if each.why:
            click.echo(f"{each.tag}: {each.why}")
    if found.warning:
        click.echo(f"warning: {found.warning}")
    if found.latest is None:
        click.echo("there is no checkpoint to load")


def _row(each: Listed, latest: str | None, size: str) -> Sequence[str]:
    counts = ["" if count is None else f"{count:,}" for count in (each.step, each.num_ranks, each.num_parameters)]
    state = f"{each.state}, latest" if each.tag == latest else each.state
    return each.tag, counts[0], each.created or "", counts[1], counts[2], size, state


# ---- verify ---------------------------------------------------------------------------------


@ckpt.command(epilog=VERIFY_EXAMPLES)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR[/TAG]")
@click.option("--threads", type=click.IntRange(1), default=4, show_default=True, help="That read at once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(checkpoint: Path, threads: int, as_json: bool) -> None:
    """Read every byte of a checkpoint and compare it with its checksums; see that nothing is missing.

    Without TAG it is the one that would be loaded. Exit code 1 if anything is wrong; the newest older checkpoint that
    is sound is looked for then.
    """
    from mlpo_hpc.checkpoint.verify import newest_sound
    from mlpo_hpc.checkpoint.verify import verify as look
    from mlpo_hpc.cli.bar import Bar

    folder, sound = _told(lambda: _locate(checkpoint)), None
    with Bar(f"verify {folder.name}") as bar:
        found = _told(lambda: look(folder, bar, threads))
    if found.faults:
        with Bar("verify older ones") as bar:
            sound = _told(lambda: newest_sound(folder.absolute().parent, found, bar))
    click.echo(json.dumps(_plain(found, sound), indent=1)) if as_json else _show_faults(found, sound)
    sys.exit(1 if found.faults else 0)


def _locate(checkpoint: Path) -> Path:
    from mlpo_hpc.checkpoint.verify import locate

    try:
        return locate(checkpoint.absolute())
    except OSError as error:
        raise storage_error("looking for checkpoints", str(checkpoint), error) from error


def _plain(found: Outline, sound: str | None) -> dict[str, Any]:
    return {
        "checkpoint": str(found.folder),
        "sound": not found.faults,
        "step": found.manifest.step if found.manifest else None,
        "num_parameters": found.num_items,
        "nbytes": found.nbytes,
        "faults": [asdict(fault) for fault in found.faults],
        "newest_sound": found.folder.name if not found.faults else sound,
    }


def _show_faults(found: Outline, sound: str | None) -> None:
    for fault in found.faults[:SHOWN_FAULTS]:
        click.echo(f"{fault.file}: {fault.text}{_names(fault)}")
    if len(found.faults) > SHOWN_FAULTS:
        click.echo(f"and {len(found.faults) - SHOWN_FAULTS} more faults (all of them: --json)")
    if not found.faults:
        click.echo(f"{found.folder} is sound: {found.nbytes:,} bytes, {found.num_items:,} trained parameters")
    elif sound is not None:
        click.echo(f"the newest older checkpoint that is sound: {found.folder.parent / sound}")
    else:
        click.echo(f"there is no older checkpoint that is sound in {found.folder.parent}")


def _names(fault: Fault) -> str:
    """Of parameters that the text does not name."""
    names = fault.parameters
    if not names or (len(names) == 1 and names[0] in fault.text):
        return ""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"; parameters: {', '.join(names[:SHOWN_NAMES])}{more}"


# ---- export ---------------------------------------------------------------------------------


def _size(_: click.Context, __: click.Parameter, text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size_bytes = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size_bytes = 0
    if size_bytes < 1:
        raise click.BadParameter(f"{text!r} is no size, such as 5GB or 2GiB")
    return size_bytes


@ckpt.command(epilog=EXPORT_EXAMPLES)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR[/TAG]")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(["safetensors", "hdf5", "universal"]), required=True, help="Format.")
@click.option(
    "--type", "kind", type=click.Choice(list(TYPES)), help="Of safetensors.  [default: that of the model's weights]"
)
@click.option("--max-file-bytes", callback=_size, default="5GB", show_default=True, help="Of one safetensors file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(checkpoint: Path, target: Path, form: str, kind: str | None, max_file_bytes: int, as_json: bool) -> None:
    """Write what is in a checkpoint to TARGET, in a format that others read.

    safetensors: a folder that transformers loads; with --type fp32 the master weights, else the 16-bit ones. hdf5: one
    file of master weights and optimizer state by parameter name. universal: a folder that stock DeepSpeed loads on any
    number of ranks. TARGET appears when it is whole; one that exists is left as it is. The tasks of srun or mpirun
    share the work.
    """
    if form != "safetensors" and kind not in (None, "fp32"):
        raise click.UsageError("state is fp32: --type is for safetensors")
    ranks = _told(_ranks)
    try:
        with undone_on_signals():
            done = _export(checkpoint, target.absolute(), ranks, form, kind and TYPES[kind], max_file_bytes)
    except MlpoError as error:
        if ranks.rank == 0:
            raise click.ClickException(str(error)) from error
        return  # the first rank tells: an exit code of ours could end the job before
    if ranks.rank == 0:
        text = f"{done['target']}: {done['nbytes']:,} bytes of {done['checkpoint']}, step {done['step']}"
        click.echo(json.dumps(done, indent=1) if as_json else text)


def _ranks() -> Ranks:
    from mlpo_hpc.cluster.crowd import launched_ranks

    try:
        return launched_ranks()
    except (ImportError, RuntimeError) as error:
        raise MlpoError(f"several tasks share the work over MPI, which is missing ({error}): start one task") from error


def _export(
    checkpoint: Path, target: Path, ranks: Ranks, form: str, kind: str | None, max_file_bytes: int
) -> dict[str, Any]:
    """Collective over `ranks`."""
    from mlpo_hpc.checkpoint.export_hdf5 import export_hdf5
    from mlpo_hpc.checkpoint.export_safetensors import export_safetensors
    from mlpo_hpc.checkpoint.export_universal import export_universal
    from mlpo_hpc.checkpoint.read import Reader
    from mlpo_hpc.cli.bar import Bar
    from mlpo_hpc.cluster.crowd import each

    # One that the first rank finds: another job may be saving.
    folder = Path(ranks.bcast(each(ranks, lambda: str(_locate(checkpoint)) if ranks.rank == 0 else "")))
    with Bar(f"export {folder.name}", quiet=ranks.rank > 0) as bar:
        try:
            reader: Reader = each(ranks, lambda: Reader(folder))
            try:
                if form == "hdf5":
                    nbytes = export_hdf5(reader, target, ranks, bar)
                elif form == "universal":
                    nbytes = export_universal(reader, target, ranks, bar)
                else:
                    nbytes = export_safetensors(reader, target, ranks, bar, kind, max_file_bytes)
            finally:
                reader.close()
        except CorruptState as error:
            raise CorruptState(f"{error}{_others(folder)}") from error
    step = reader.manifest.step
    return {"target": str(target), "checkpoint": str(folder), "step": step, "format": form, "nbytes": nbytes}


def _others(folder: Path) -> str:
    from mlpo_hpc.checkpoint.find import committed

    tags = [tag for tag, _ in committed(folder.parent) if tag != folder.name]
    return f". There are also: {', '.join(tags)}" if tags else ""


def _told(action: Callable[[], Any]) -> Any:
    """What an action gives; what is wrong with it is told, without a traceback."""
    try:
        return action()
    except (MlpoError, OSError) as error:
        raise click.ClickException(str(error)) from error
