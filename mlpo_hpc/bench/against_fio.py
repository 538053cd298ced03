"""How a tier's lanes compare with fio on the same disk: ``python -m mlpo_hpc.bench.against_fio DIR``.

Sequential reading and writing, O_DIRECT, in turns; fio at its best of some block sizes and depths.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import click

from mlpo_hpc.state.cache import Buffer
from mlpo_hpc.storage.folder import private_folder
from mlpo_hpc.storage.lane import Job, Lane
from mlpo_hpc.storage.posix import open_raw
from mlpo_hpc.storage.tier import StorageTier

BLOCKS = ("1M", "4M", "16M")
DEPTHS = (2, 8, 32)
CHUNK_BYTES = 32 * 2**20
NUM_BUFFERS = 6
FIO_S = 300.0


class Stream:
    """Chunks through one lane, as many in memory as a small budget holds."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._buffers = [Buffer(CHUNK_BYTES) for _ in range(NUM_BUFFERS)]

    def bps(self, lane: Lane) -> float:
        """Bytes per second of moving all chunks."""
        free = threading.Semaphore(NUM_BUFFERS)
        failures: list[BaseException] = []

        def done(_: int | None, error: BaseException | None) -> None:
            if error is not None:
                failures.append(error)
            free.release()

        begin = time.perf_counter()
        for number in range(self._num_chunks):
            free.acquire()
            view = self._buffers[number % NUM_BUFFERS].view(CHUNK_BYTES)
            lane.submit(Job(number, view, f"chunk {number}", None, done))
        for _ in range(NUM_BUFFERS):
            free.acquire()
        if failures:
            raise failures[0]
        return self._num_chunks * CHUNK_BYTES / (time.perf_counter() - begin)


def fio_bps(path: Path, way: str, nbytes: int, block: str, depth: int) -> float:
    """Bytes per second of fio; the file is there afterwards."""
    options = [f"--filename={path}", f"--rw={way}", f"--bs={block}", f"--iodepth={depth}", f"--size={nbytes}"]
    command = ["fio", "--name=x", "--ioengine=libaio", "--direct=1", "--output-format=json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_S, check=True)
    return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@click.option("--size-gb", type=click.FloatRange(0.1), default=2.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(directory: str, size_gb: float, rounds: int) -> None:
    """Compare; prints JSON."""
    if shutil.which("fio") is None:
        raise click.ClickException("fio is not installed")
    num_chunks = max(NUM_BUFFERS, int(size_gb * 1e9) // CHUNK_BYTES)
    nbytes = num_chunks * CHUNK_BYTES
    found: dict[str, object] = {}
    with ExitStack() as endings:
        path = Path(endings.enter_context(private_folder(directory))) / "fio"
        tier = StorageTier("disk", open_raw(directory, CHUNK_BYTES, num_chunks))
        endings.callback(tier.close)
        stream = Stream(num_chunks)
        for way, lane in (("write", tier.writes), ("read", tier.reads)):
            stream.bps(lane)  # blocks are allocated, for both
            fio_bps(path, "write", nbytes, "16M", 8)
            tried = {(block, depth): fio_bps(path, way, nbytes, block, depth) for block in BLOCKS for depth in DEPTHS}
            block, depth = max(tried, key=lambda setting: tried[setting])
            pairs = [(stream.bps(lane), fio_bps(path, way, nbytes, block, depth)) for _ in range(rounds)]
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            found[way] = {
                "ours_bps": statistics.median(ours for ours, _ in pairs),
                "fio_bps": statistics.median(theirs for _, theirs in pairs),
                "fio_best": [block, depth],
                "ratio": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
            }
    click.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
