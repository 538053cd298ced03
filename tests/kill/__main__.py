"""``kill -9`` at many moments: ``python -m tests.kill engine --moments 200 --json build/kill.json``.

A run is killed, resumed, killed, ... and in the end compared with one that was never killed. Exit code 1 if a
resume did not go on from the newest committed step, bit for bit, or if a survivor did not end, or something was left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["engine", "example"], help="a small model, or the whole example")
    parser.add_argument("--moments", type=int, default=20, help="how often to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16", help="of the small model")
    parser.add_argument("--container", choices=["raw", "hdf5"], default="raw", help="of its second tier")
    parser.add_argument("--section", type=json.loads, default={}, metavar="JSON", help="for mlp_offload")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tally there")
    args = parser.parse_args()
    from tests.kill import chain, programs  # imports what all lives are forked with

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        place = programs.Place(Path(folder), 0, args.section, args.dtype, args.container)
        run = chain.Chain(place, args.program, chain.draw(args.seed, args.moments), print)
        killed = run.go()
    found = {
        "program": args.program,
        "seed": args.seed,
        "dtype": args.dtype,
        "container": args.container,
        "steps": run.run.steps,
        **chain.tally(killed),
        "faults": run.faults,
        "took_s": time.monotonic() - begin,
        "moments": [asdict(each) for each in killed],
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))
    show(found)
    return 1 if found["faults"] else 0


def show(found: dict) -> None:
    for fault in found["faults"]:
        print(f"FAULT {fault}\n")
    for who, phases in found["by_victim"].items():
        print(f"{who:4} killed " + ", ".join(f"{count} x in {phase}" for phase, count in sorted(phases.items())))
    print(
        f"{found['killed']} kills, {found['steps']} steps, {len(found['faults'])} faults; survivors ended within "
        f"{found['longest_survival_s']:.1f} s; {found['took_s']:.0f} s in total (seed {found['seed']})"
    )


if __name__ == "__main__":
    sys.exit(main())
