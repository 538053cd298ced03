"""The looks that run in a process of their own: ``python -m mlpo_hpc.doctor.looks NAME ARGUMENT...``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pydantic import BaseModel

from mlpo_hpc.doctor import gpu, hdf5, mpi, storage
from mlpo_hpc.doctor.child import PREFIX

LOOKS: dict[str, Callable[..., BaseModel]] = {
    "mpi": mpi.look,
    "h5py": hdf5.look,
    "gpu": gpu.look,
    "tier": storage.look,
    "places": storage.look_at_places,
}


def main() -> None:
    """Look, and answer on standard output."""
    name, *arguments = sys.argv[1:]
    # A line of its own, whatever a library wrote before without ending its line.
    print(f"\n{PREFIX}{LOOKS[name](*arguments).model_dump_json()}", flush=True)


if __name__ == "__main__":
    main()
