"""Read one parameter's optimizer state from state files that were kept ("keep": true), with h5py alone.

python examples/read_moments.py PARAMETER FILE...      the files of all nodes, and of all tiers that hold state
"""

import sys
from collections.abc import Iterable

import h5py
import numpy as np


def read(name: str, files: Iterable[h5py.File]) -> dict[str, np.ndarray]:
    """Master weights (``fp32``) and moments, each in the shape of the parameter."""
    parameter = next(file["parameters"][name] for file in files if name in file["parameters"])
    state: dict[str, np.ndarray] = {}
    for rank, subgroup, begin, first, numel in {tuple(p) for f in files for p in f["parameters"].get(name, ())}:
        chunks = {}
        for group in (file[f"ranks/{rank}"] for file in files if f"ranks/{rank}/slots" in file):
            newest = max(group["index"], key=lambda copy: copy["generation"])
            for slot in np.flatnonzero(newest["slots"]["subgroup"] == subgroup):
                held = newest["slots"][slot]
                chunks[held["chunk"]] = group["slots"][slot, : held["nbytes"] // 4]
        record = np.concatenate([chunks[number] for number in range(len(chunks))])
        _, stride, vectors = group["records"][subgroup]
        for place, vector in enumerate(vectors.decode().split()):
            whole = state.setdefault(vector, np.empty(parameter.attrs["shape"], np.float32)).reshape(-1)
            whole[first : first + numel] = record[place * stride + begin :][:numel]
    return state


if __name__ == "__main__":
    for vector, values in read(sys.argv[1], [h5py.File(path) for path in sys.argv[2:]]).items():
        print(f"{vector:12} {values.shape}  mean {values.mean():.3e}  largest {np.abs(values).max():.3e}")
