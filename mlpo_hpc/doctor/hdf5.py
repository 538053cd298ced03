"""h5py, which lays out state files on shared storage: there, and parallel or not."""

from __future__ import annotations

from pydantic import BaseModel

from mlpo_hpc.doctor.finding import Finding


class Hdf5Facts(BaseModel):
    """What a child saw."""

    missing: str = ""
    version: str = ""
    hdf5_version: str = ""
    parallel: bool = False


def look() -> Hdf5Facts:
    """Import h5py; MPI, if it is built with it, is not started."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
    except ImportError:
        pass  # then h5py has no MPI either, or says so itself
    try:
        import h5py
    except Exception as error:  # built for another MPI or another HDF5 it fails in many ways
        return Hdf5Facts(missing=f"{type(error).__name__}: {error}")
    return Hdf5Facts(
        version=h5py.__version__, hdf5_version=h5py.version.hdf5_version, parallel=bool(h5py.get_config().mpi)
    )


def judge(facts: Hdf5Facts | None, trouble: str) -> Finding:
    """Finding ``h5py``."""
    if facts is None or facts.missing:
        seen = f"importing h5py {trouble}" if facts is None else f"h5py cannot be imported ({facts.missing})"
        advice = "build it against the loaded MPI and HDF5 (see the README), or take its wheel: pip install h5py"
        return Finding(check="h5py", verdict="fail", seen=seen, advice=advice)
    how = (
        "with MPI: ranks lay out files together"
        if facts.parallel
        else "without MPI: a node's first rank lays out files"
    )
    return Finding(check="h5py", verdict="ok", seen=f"h5py {facts.version} over HDF5 {facts.hdf5_version}, {how}")
