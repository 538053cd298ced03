"""Checks of the module mlpo_hpc for ReFrame 4: copy this folder, ``src`` included, into the suite of the site.

    reframe -c mlpo_hpc_check.py --run
    reframe -c mlpo_hpc_check.py --run -S mlpo_hpc_training.local_dir=/mnt/bb/$USER -n 'mlpo_hpc_training.*num_nodes=1'

What they measure is for the site's own ``reference``: https://reframe-hpc.readthedocs.io/en/stable/tutorial.html
"""

import json
import re

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import deferrable, parameter, performance_function, run_before, sanity_function, variable

GB = 1e9


class MlpoHpcCheck(rfm.RunOnlyRegressionTest):
    """With the module loaded, everywhere; narrow it with ``-S valid_systems=...``."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    modules = ["mlpo_hpc"]
    tags = {"mlpo_hpc"}


@rfm.simple_test
class mlpo_hpc_command(MlpoHpcCheck):
    """What is loaded starts, and is what the module says."""

    executable = "mlpo"
    executable_opts = ["--version"]
    postrun_cmds = ["echo root $MLPO_HPC_ROOT", "command -v mlpo python"]

    @sanity_function
    def comes_from_the_module(self):
        root = re.escape(sn.evaluate(sn.extractsingle(r"^root (\S+)", self.stdout, 1)))
        expected = (r"mlpo, version \d.*", f"{root}/bin/mlpo", f"{root}/bin/python")
        return sn.all([sn.assert_found(f"^{line}$", self.stdout) for line in expected])


@rfm.simple_test
class mlpo_hpc_storage(MlpoHpcCheck):
    """How fast a node-local and a shared directory are, read and written by one rank and by four at once."""

    local_dir = variable(str, value="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}")
    shared_dir = variable(str, value="$PWD")
    executable = "mlpo"
    num_tasks = 1

    @run_before("run")
    def name_the_directories(self):
        self.executable_opts = ["probe", f"local={self.local_dir}", f"shared={self.shared_dir}", "--json"]

    @deferrable
    def measured(self):
        """By tier."""
        with open(sn.evaluate(self.stdout)) as file:
            return {tier["name"]: tier for tier in json.load(file)["measured"]}

    @sanity_function
    def both_are_storage(self):
        return sn.all([sn.assert_eq(self.measured()[name]["warnings"], []) for name in ("local", "shared")])

    @performance_function("GB/s")
    def local_read(self):
        return self.measured()["local"]["read_bps"] / GB

    @performance_function("GB/s")
    def local_write(self):
        return self.measured()["local"]["write_bps"] / GB

    @performance_function("GB/s")
    def shared_read(self):
        return self.measured()["shared"]["read_bps"] / GB

    @performance_function("GB/s")
    def shared_write(self):
        return self.measured()["shared"]["write_bps"] / GB


@rfm.simple_test
class mlpo_hpc_training(MlpoHpcCheck):
    """A small model learns, and its state goes through both tiers."""

    num_nodes = parameter([1, 2])
    local_dir = variable(str, value="auto")
    shared_dir = variable(str, value="$PWD")
    num_tasks_per_node = 2
    executable = "python"
    time_limit = "10m"

    @run_before("run")
    def say_what_runs_where(self):
        self.num_tasks = self.num_nodes * self.num_tasks_per_node
        self.executable_opts = ["train.py", self.local_dir, self.shared_dir]

    @sanity_function
    def it_learns_through_both_tiers(self):
        losses = sn.extractall(r"^step \d+: loss (\S+),", self.stdout, 1, float)
        moved = sn.extractall(r"local (\d+) bytes, shared (\d+) bytes$", self.stdout, (1, 2), int)
        return sn.all(
            [
                sn.assert_eq(sn.count(losses), 10),
                sn.assert_lt(losses[-1], losses[0]),
                sn.assert_gt(sn.min(moved[-1]), 0),
            ]
        )

    @performance_function("s")
    def update(self):
        return sn.avg(sn.extractall(r"update (\S+) s", self.stdout, 1, float))
