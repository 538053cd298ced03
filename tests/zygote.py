"""A process that has imported a module, and forks ranks that run its ``main``: importing DeepSpeed takes seconds.

``python -m tests.zygote MODULE`` takes orders as JSON lines on standard input, one answer each. A rank is as if it had
been started by itself: its environment, arguments, folder for temporary files and output are those of the order.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

USED_LATER = ("mlpo_hpc.engine.stage3", "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo")
"""What an engine imports when it is made."""
ROOT = Path(__file__).parent.parent


class Zygote:
    """The side of the tests.

    Parameters
    ----------
    module : str
        What is imported once.
    env : dict
        With which it is imported.
    """

    def __init__(self, module: str, env: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", module],
            env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        atexit.register(self.close)

    def ask(self, **order: Any) -> Any:
        """The answer to an order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"the zygote ended: {self._log.read().decode()[-2000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Forked:
    """A rank that a zygote forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, zygote: Zygote, argv: list[str], env: dict[str, str], log: IO[str]) -> None:
        self._zygote = zygote
        self.returncode: int | None = None
        self.pid: int = zygote.ask(do="start", argv=argv, env=env, log=f"/proc/{os.getpid()}/fd/{log.fileno()}")

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            self.returncode = self._zygote.ask(do="poll", pid=self.pid, block=False)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = self._zygote.ask(do="poll", pid=self.pid, block=True)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """As `kill -9`."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Import, then fork on orders until there are none any more."""
    module = importlib.import_module(sys.argv[1])
    for name in USED_LATER:
        importlib.import_module(name)
    orders, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in orders:
        order = json.loads(line)
        if order["do"] == "start":
            pid = os.fork()
            if not pid:
                _become(order)
                module.main()
                return
            found: int | None = pid
        else:
            ended, status = os.waitpid(order["pid"], 0 if order["block"] else os.WNOHANG)
            found = os.waitstatus_to_exitcode(status) if ended else None
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _become(order: dict[str, Any]) -> None:
    """Nothing of the zygote's own is left."""
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    sys.argv = order["argv"]


if __name__ == "__main__":
    main()
