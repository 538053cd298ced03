# make demo     pre-train a GPT on two ranks over two storage tiers
# make test     the tests (one machine, no GPU needed); test-mpi, test-slurm: those with an MPI, a Slurm
VENV ?= .venv
BIN = $(VENV)/bin
# An MPI on PATH comes first; the environment has a wheel of Open MPI if that one did not work.
export PATH := $(if $(wildcard $(BIN)/mpirun),$(abspath $(BIN)):$(PATH),$(PATH):$(abspath $(BIN)))
DEMO_ARGS ?= --host-memory 300MB
PYTEST = $(BIN)/python -m pytest

.PHONY: demo test test-mpi test-slurm test-all lint clean

$(VENV)/.ready: setup.cfg constraints.txt .ci/setup
	.ci/setup $(VENV) dev

demo: $(VENV)/.ready
	.ci/mpirun 2 $(BIN)/python examples/pretrain_gpt.py --out runs/demo $(DEMO_ARGS)

test: $(VENV)/.ready
	$(PYTEST) $(PYTEST_ARGS)

# On 1, 2 and 4 ranks under each MPI at hand: that on PATH, Open MPI's wheel, MPICH's wheel.
test-mpi: $(VENV)/.ready
	.ci/setup_mpis $(VENV)
	$(BIN)/python -m tests.mpi.launch $(VENV)/mpi/*

# Under a real Slurm with two nodes in namespaces of this machine; needs root, slurm-wlm and munge.
test-slurm: $(VENV)/.ready
	.ci/setup_mpis $(VENV)
	$(PYTEST) tests/slurm $(PYTEST_ARGS)

test-all: $(VENV)/.ready
	$(PYTEST) --all $(PYTEST_ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
