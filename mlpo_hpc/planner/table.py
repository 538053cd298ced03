"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from mlpo_hpc.planner.commit import Commit
from mlpo_hpc.planner.comparison import COLUMNS, Comparison
from mlpo_hpc.planner.plan import Outlook, Plan
from mlpo_hpc.planner.policy import MLP, OURS, ZERO3
from mlpo_hpc.planner.upkeep import Upkeep

WIDTH = 200
GB = 1e9


def show(plan: Plan) -> None:
    """Print it to stdout: the answer first, then where it comes from."""
    console = Console(color_system=None, width=WIDTH, highlight=False)
    for line in headlines(plan):
        console.print(line, markup=False)
    for table in (_times(plan), _memory(plan), _storage(plan), _checkpoints(plan), _advice(plan)):
        if table.row_count:
            console.print()
            console.print(table)


def headlines(plan: Plan) -> list[str]:
    """What one wants to know first."""
    job, machine = plan.job, plan.job.machine
    what = f"{job.model.numel / GB:.1f} B parameters on {machine.nodes} x {machine.gpus} accelerators"
    lines = [f"{what}: {'does not fit' if plan.problems else 'fits'}"]
    lines += [f"  problem: {problem}" for problem in plan.problems]
    if ours := plan.outlooks.get(OURS.name):
        lines.append(
            f"an iteration of {job.text_tokens:,} text tokens takes {_seconds(ours.forecast.iteration_s)} s, "
            f"{ours.text_tokens_ps:,.0f} tokens/s{_against(plan, ours)}"
        )
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    return lines


def _against(plan: Plan, ours: Outlook) -> str:
    others = [plan.outlooks[policy.name] for policy in (ZERO3, MLP) if policy.name in plan.outlooks]
    times = [f"{o.forecast.iteration_s / ours.forecast.iteration_s:.2f} ({o.policy.name})" for o in others]
    return f"; others take {', '.join(times)} times as long" if times else ""


def _times(plan: Plan) -> Table:
    table = _table("seconds an iteration", ("system",), ("forward", "backward", "update", "iteration", "tokens/s"))
    for name in ("update floor", "update/floor", "state found in memory"):
        table.add_column(name, justify="right")
    for outlook in plan.outlooks.values():
        forecast = outlook.forecast
        times = (forecast.forward_s, forecast.backward_s, forecast.update_s, forecast.iteration_s)
        rest = (_seconds(forecast.floor_s), _ratio(forecast.update_s, forecast.floor_s), f"{forecast.found_share:.0%}")
        table.add_row(outlook.policy.name, *map(_seconds, times), f"{outlook.text_tokens_ps:,.0f}", *rest)
    table.caption = "\n".join(f"{name}: {outlook.policy.meaning}" for name, outlook in plan.outlooks.items())
    table.caption_justify = "left"
    return table


def _memory(plan: Plan) -> Table:
    table = _table("memory", ("of each", "what"), ("GB", "of"))
    has = {"accelerator": plan.job.machine.gpu_bytes, "node": plan.job.machine.node_bytes}
    for place, parts in (("accelerator", plan.gpu_bytes), ("node", plan.host_bytes)):
        for what, nbytes in parts.items():
            table.add_row(place, what, _gigabytes(nbytes), "")
        table.add_row(place, "together", _gigabytes(sum(parts.values())), _gigabytes(has[place]), end_section=True)
    return table


def _storage(plan: Plan) -> Table:
    table = _table(
        "storage, ours", ("what", "where"), ("GB", "GB read a step", "GB written a step", "TB written a day")
    )
    table.add_column("drive writes a day", justify="right")
    if ours := plan.outlooks.get(OURS.name):
        wear = {drive.tier: drive.drive_writes for drive in plan.wear}
        for tier, nbytes in ours.tier_bytes.items():
            moved = ours.forecast.moved_bytes[tier]
            rates = (_gigabytes(moved["read"]), _gigabytes(moved["write"]), f"{ours.written_a_day(tier) / 1e12:,.1f}")
            writes = wear.get(tier)
            table.add_row(
                "state of a node", tier, _gigabytes(nbytes), *rates, "" if writes is None else f"{writes:.1f}"
            )
    for tier, nbytes in (plan.upkeep.written_bytes if plan.upkeep else {}).items():
        table.add_row("checkpoints of a node", tier, "", "", "", f"{nbytes / 1e12:,.1f}", "")
    if plan.upkeep and plan.upkeep.written_bytes:
        table.caption = "Drive writes are those of state and checkpoints together."
    return table


def _checkpoints(plan: Plan) -> Table:
    table = _table("checkpoints, ours", ("what", "how much"), ())
    if plan.commit and plan.upkeep and (ours := plan.outlooks.get(OURS.name)):
        for what, value in (*_one(plan.commit, ours.forecast.iteration_s), *_many(plan.commit, plan.upkeep)):
            table.add_row(what, value)
    return table


def _one(commit: Commit, iteration_s: float) -> list[tuple[str, str]]:
    """Of a checkpoint."""
    waiting, beside = commit.manners["wait"], commit.manners["background"]
    within_s = beside.iterations * iteration_s + beside.slowed_s
    return [
        ("size", f"{_gigabytes(commit.nbytes)} GB on {commit.tier}"),
        ('"commit": "wait"', f"training waits for at least {_seconds(waiting.slowed_s)} s"),
        (
            '"commit": "background"',
            f"committed within {beside.iterations:,} iterations, {_seconds(within_s)} s; "
            f"they take at least {_seconds(beside.slowed_s)} s longer",
        ),
        ("stop signal before the time limit", f"--signal=B:USR1@{commit.lead_s}"),
    ]


def _many(commit: Commit, upkeep: Upkeep) -> list[tuple[str, str]]:
    """Of a schedule."""
    found = []
    if upkeep.every is not None and upkeep.slowed_share is not None:
        share = f"{upkeep.slowed_share:.2%} of the time of training"
        found.append((f'one every {upkeep.every:,} iterations, "{upkeep.commit}"', share))
    if upkeep.every is not None or upkeep.most_count > 1:
        space = f"{_gigabytes(upkeep.most_count * commit.nbytes)} GB for {upkeep.most_count}"
        grown = f", and {_gigabytes(upkeep.grown_bytes)} more a day that stay" if upkeep.grown_bytes else ""
        found.append(("space, the one in the making too", f"{space}{grown}"))
    if upkeep.room_bytes is not None:
        found.append(("room beside state", f"{_gigabytes(max(0.0, upkeep.room_bytes))} GB"))
    return found


def _advice(plan: Plan) -> Table:
    table = _table("what would help most", ("change",), ("tokens/s of an accelerator, in units of now",))
    for what, gain in plan.advice:
        table.add_row(what, f"{gain:.2f}")
    return table


def show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Print predictions beside what was measured, as Markdown."""
    console = Console(color_system=None, width=WIDTH, highlight=False)
    console.print(comparison_table(comparisons))


def comparison_table(comparisons: Iterable[Comparison]) -> Table:
    """A line for each run: seconds predicted / measured (error), and how far the predicted update is from its floor."""
    table = _table(None, ("load", "system"), [column.removesuffix("_s") for column in COLUMNS])
    table.add_column("update floor", justify="right")
    table.add_column("update/floor", justify="right")
    table.box = box.MARKDOWN
    for one in comparisons:
        cells = (
            f"{_seconds(one.predicted(column))} / {one.measured[column]:.4g} ({one.error(column):+.1%})"
            for column in COLUMNS
        )
        to_floor = _ratio(one.forecast.update_s, one.forecast.floor_s)
        table.add_row(one.load, one.system, *cells, _seconds(one.forecast.floor_s), to_floor)
    return table


def _table(title: str | None, words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / GB:,.0f}" if nbytes >= 100 * GB else f"{nbytes / GB:.3g}"


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else ""
