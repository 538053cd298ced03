"""Read one parameter's optimizer state from state files that were kept ("keep": true), with h5py.

python examples/read_moments.py PARAMETER FILE...      the files of all nodes, and of all tiers that hold state
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack

import h5py
import numpy as np
from xxhash import xxh3_64_intdigest

from mlpo_hpc.storage.hdf5 import open_for_reading
from mlpo_hpc.storage.index import newest


def read(name: str, files: Iterable[h5py.File]) -> dict[str, np.ndarray]:
    """Master weights (``fp32``) and moments, each in the shape of the parameter.

    Raises
    ------
    ValueError
        If something is missing, or was overwritten after the index was (the job was killed in a step).
    """
    parameter = next(file["parameters"][name] for file in files if name in file["parameters"])
    state: dict[str, np.ndarray] = {}
    steps = set()
    for rank, subgroup, begin, first, numel in {tuple(p) for f in files for p in f["parameters"].get(name, ())}:
        chunks = {}
        for file in (file for file in files if f"ranks/{rank}/slots" in file):
            group = file[f"ranks/{rank}"]
            index = newest(group["index"][:], file.filename)
            steps.add(int(index["step"]))
            for slot in np.flatnonzero(index["slots"]["subgroup"] == subgroup):
                held = index["slots"][slot]
                data = group["slots"][slot, : held["nbytes"] // 4]
                if held["checksum"] and xxh3_64_intdigest(data) != held["checksum"]:
                    raise ValueError(f"{file.filename}, slot {slot} was overwritten after step {index['step']}")
                chunks[held["chunk"]] = data
        _, stride, vectors = group["records"][subgroup]
        names = vectors.decode().split()
        record = np.concatenate([np.empty(0, np.float32), *(chunks[number] for number in range(len(chunks)))])
        if len(steps) > 1 or record.size < len(names) * stride:
            raise ValueError(f"rank {rank}, subgroup {subgroup} is not whole in these files, of steps {sorted(steps)}")
        for place, vector in enumerate(names):
            whole = state.setdefault(vector, np.empty(parameter.attrs["shape"], np.float32)).reshape(-1)
            whole[first : first + numel] = record[place * stride + begin :][:numel]
    return state


if __name__ == "__main__":
    with ExitStack() as opened:
        state = read(sys.argv[1], [opened.enter_context(open_for_reading(path)) for path in sys.argv[2:]])
    for vector, values in state.items():
        print(f"{vector:12} {values.shape}  mean {values.mean():.3e}  largest {np.abs(values).max():.3e}")
