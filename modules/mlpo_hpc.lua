-- Lmod module file. Copy it to <modulefiles>/mlpo_hpc/<version>.lua and set `prefix` to the
-- environment that holds the package (python -m venv; pip install mlpo-hpc).
help([[Multi-level, multi-path offload of optimizer state for DeepSpeed ZeRO-3.
Puts the environment's commands on PATH; nothing else is changed.]])
whatis("Name: mlpo_hpc")
whatis("Description: offload of optimizer state to NVMe and the parallel file system at once")
whatis("Category: machine learning")

local prefix = os.getenv("MLPO_HPC_PREFIX") or "/opt/mlpo_hpc"

family("mlpo_hpc")
setenv("MLPO_HPC_ROOT", prefix)
prepend_path("PATH", pathJoin(prefix, "bin"))
