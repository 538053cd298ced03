"""``mlpo plan``: what a run needs and how long its iterations take, before there is an allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from mlpo_hpc.errors import ConfigError, MlpoError

if TYPE_CHECKING:
    from mlpo_hpc.planner.job import Job
    from mlpo_hpc.planner.machine import PlanTier
    from mlpo_hpc.planner.upkeep import Schedule

EXAMPLES = """
\b
Examples:
  mlpo plan llama-3-70b --nodes 4 --tier nvme=6.9/5.3,half,capacity=3.84TB --tier pfs=3.6/3.6,shared,total=100
  mlpo plan ./model/config.json --probe probe.json      from srun -N1 -n4 mlpo probe nvme=... pfs=... --json
  mlpo plan 40B --probe probe.json --tier nvme,capacity=3.84TB --node-memory 512GiB --accumulation 8 --json
  mlpo plan 13B --probe probe.json --tier pfs,capacity=20TB --checkpoint-every 30min --commit background --keep-last 3
  mlpo plan --published                                 how well published runs are predicted
  mlpo plan --against bench.json                        how well what mlpo bench --json wrote is
"""


def _size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Bytes."""
    from mlpo_hpc.planner.read_tiers import read_size

    try:
        return None if text is None else read_size(text)
    except MlpoError as error:
        raise click.BadParameter(str(error)) from None


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--gpus", type=click.IntRange(1), default=4, show_default=True, help="Accelerators of a node, a rank each."
)
@click.option("--gpu-memory", callback=_size, default="80GB", show_default=True, metavar="BYTES")
@click.option(
    "--gpu-tflops", type=click.FloatRange(0, min_open=True), default=380, show_default=True, help="As reached."
)
@click.option("--node-memory", callback=_size, default="512GiB", show_default=True, metavar="BYTES")
@click.option("--host-memory", callback=_size, metavar="BYTES", help="Of a node, for state.  [default: as the engine]")
@click.option(
    "--network", type=click.FloatRange(0, min_open=True), default=50, show_default=True, help="GB/s of an accelerator."
)
@click.option(
    "--tier",
    "specs",
    multiple=True,
    metavar="NAME=READ/WRITE[,...]",
    help="Storage as a node sees it, GB/s, the fastest first; then half (duplex), shared, capacity=SIZE, total=GB/s "
    "(of all nodes), at-once=PART (what all ranks at once get of it).",
)
@click.option("--probe", type=click.File(), help="What mlpo probe --json printed; '-': stdin.")
@click.option("--sequence", type=click.IntRange(1), default=2048, show_default=True, help="Text tokens.")
@click.option("--micro-batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a rank.")
@click.option(
    "--accumulation", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches an iteration."
)
@click.option("--sub-group-size", type=click.FloatRange(1), default=1e8, show_default=True, help="Parameters.")
@click.option("--checkpoint-every", metavar="N|Nmin", help="Iterations or minutes from one checkpoint to the next.")
@click.option(
    "--commit",
    type=click.Choice(["wait", "background"]),
    default="wait",
    show_default=True,
    help="As checkpoint.commit of the configuration.",
)
@click.option("--keep-last", type=click.IntRange(1), help="As checkpoint.keep_last.  [default: all stay]")
@click.option("--keep-every", type=click.IntRange(1), help="As checkpoint.keep_every.")
@click.option(
    "--weak-scaling", type=click.Path(dir_okay=False), metavar="PNG", help="Draw 1 to 1024 such nodes instead."
)
@click.option("--published", is_flag=True, help="Instead of a MODEL: predict the published runs of MLP-Offload.")
@click.option("--against", type=click.File(), metavar="FILE", help="Or what mlpo bench measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str | None,
    specs: tuple[str, ...],
    probe: TextIO | None,
    weak_scaling: str | None,
    published: bool,
    against: TextIO | None,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Tell whether MODEL fits, how long an iteration takes, and what to change.

    MODEL is a preset (paper-40b ... paper-120b, llama-2-7b, llama-2-13b, llama-3-8b, llama-3-70b, llama-3-405b), a
    config.json or its folder, or a number of parameters such as 13B. Steps are simulated, chunk by chunk; nothing
    is measured here. The exit code is 1 if it does not fit.
    """
    if (model is None) == (not published and against is None):
        raise click.UsageError("give either a MODEL, or --published, --against FILE, or both of these")
    try:
        if model is None:
            _tell_comparisons(published, against, as_json)
            return
        schedule = _schedule(**wishes)
        job = _job(model, _tiers(specs, probe), **wishes)
        if weak_scaling is not None:
            _tell_weak_scaling(job, weak_scaling, as_json)
            return
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except (MlpoError, OSError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error
    _tell_plan(job, schedule, as_json)


def _tiers(specs: tuple[str, ...], probe: TextIO | None) -> tuple[PlanTier, ...]:
    from mlpo_hpc.planner.read_tiers import read_probe, read_tiers

    tiers = read_tiers(specs, read_probe(probe.read()) if probe is not None else ())
    if not tiers:
        raise click.UsageError("give the storage: --tier nvme=6.9/5.3,half (GB/s), or --probe FILE")
    return tiers


def _job(model: str, tiers: tuple[PlanTier, ...], **wishes: Any) -> Job:
    from mlpo_hpc.planner.job import Job
    from mlpo_hpc.planner.machine import Machine
    from mlpo_hpc.planner.model import find_model

    machine = Machine(
        tiers,
        nodes=wishes["nodes"],
        gpus=wishes["gpus"],
        gpu_bytes=wishes["gpu_memory"],
        gpu_flops=1e12 * wishes["gpu_tflops"],
        network_bps=1e9 * wishes["network"],
        node_bytes=wishes["node_memory"],
    )
    sizes = {name: wishes[name] for name in ("sequence", "micro_batch", "accumulation")}
    size = int(wishes["sub_group_size"])
    return Job(find_model(model), machine, **sizes, host_bytes=wishes["host_memory"], sub_group_size=size)


def _schedule(**wishes: Any) -> Schedule:
    from mlpo_hpc.planner.upkeep import Schedule, read_interval

    every = wishes["checkpoint_every"]
    interval = {} if every is None else read_interval(every)
    return Schedule(**interval, **{name: wishes[name] for name in ("commit", "keep_last", "keep_every")})


def _tell_plan(job: Job, schedule: Schedule, as_json: bool) -> None:
    from mlpo_hpc.planner.plan import make_plan
    from mlpo_hpc.planner.table import show

    made = make_plan(job, schedule=schedule)
    if as_json:
        click.echo(json.dumps(made.plain(), indent=1))
    else:
        show(made)
    if made.problems:
        raise SystemExit(1)


def _tell_weak_scaling(job: Job, path: str, as_json: bool) -> None:
    from mlpo_hpc.planner.weak_scaling import NODES, draw_weak_scaling

    if not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"{path}: there is no such folder")
    found = draw_weak_scaling(job, path)
    if as_json:
        click.echo(json.dumps({"nodes": NODES, "update_s": found}, indent=1))
    else:
        click.echo(f"drawn: {path}")


def _tell_comparisons(published: bool, against: TextIO | None, as_json: bool) -> None:
    from mlpo_hpc.bench.predict import predict
    from mlpo_hpc.planner.published import compare
    from mlpo_hpc.planner.table import show_comparisons

    found = [*(compare() if published else ()), *(predict(against.read()) if against is not None else ())]
    if as_json:
        click.echo(json.dumps([one.plain() for one in found], indent=1))
    else:
        show_comparisons(found)
