# make demo     pre-train a GPT on two ranks over two storage tiers
# make test     the tests (one machine, no GPU needed); test-mpi, test-slurm: with an MPI, a Slurm; test-long, test-kill
# make kill     kill -9 of a run at 200 moments of SEED, resumed each time; what came of it in build/kill.json
# make install PREFIX=/apps     for all users, as an environment module (docs/modules.md); uninstall, wheels
VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= mpi
BIN = $(VENV)/bin
SITE_PATH := $(PATH)
# An MPI on PATH comes first; the environment has a wheel of Open MPI if that one did not work.
export PATH := $(if $(wildcard $(BIN)/mpirun),$(abspath $(BIN)):$(PATH),$(PATH):$(abspath $(BIN)))
DEMO_ARGS ?= --host-memory 300MB
SEED ?= 1
PYTEST = $(BIN)/python -m pytest
# Most tests compute on one core: two files at a time, those that take long first.
TWO_AT_A_TIME = -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-mpi test-slurm test-kill test-long test-all kill lint install uninstall wheels clean

$(VENV)/.ready: setup.cfg constraints.txt .ci/setup
	.ci/setup $(VENV) dev

demo: $(VENV)/.ready
	.ci/mpirun 2 $(BIN)/python examples/pretrain_gpt.py --out runs/demo $(DEMO_ARGS)

test: $(VENV)/.ready
	$(PYTEST) $(TWO_AT_A_TIME) $(PYTEST_ARGS)

# On 1, 2 and 4 ranks under each MPI at hand: that on PATH, Open MPI's wheel, MPICH's wheel.
test-mpi: $(VENV)/.ready
	.ci/setup_mpis $(VENV)
	$(BIN)/python -m tests.mpi.launch $(VENV)/mpi/*

# Under a real Slurm with two nodes in namespaces of this machine; needs root, slurm-wlm and munge.
test-slurm: $(VENV)/.ready
	.ci/setup_mpis $(VENV)
	$(PYTEST) tests/slurm $(PYTEST_ARGS)

# 20 times a small run, 12 times one that saves beside training, 3 times the whole example.
test-kill: $(VENV)/.ready
	$(PYTEST) tests/kill $(PYTEST_ARGS)

# What takes long in tests/integration: trainers, benchmarks, exports against DeepSpeed's converter, stopped runs.
test-long: $(VENV)/.ready
	$(PYTEST) --long tests/integration $(PYTEST_ARGS)

test-all: $(VENV)/.ready
	$(PYTEST) --all tests/unit tests/integration tests/gpu tests/kill $(PYTEST_ARGS)

kill: $(VENV)/.ready
	$(BIN)/python -m tests.kill engine --moments 200 --seed $(SEED) --json build/kill.json

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy modules/*.py

# With the modules of the site and their Python, not with the environment of the tests.
install uninstall wheels: export PATH := $(SITE_PATH)
install uninstall wheels:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is not Python 3.11 or newer: load a module that has it, or give PYTHON=" >&2; exit 1; }
	@$(PYTHON) -sB modules/install.py $@ --prefix="$(PREFIX)" --wheels="$(WHEELS)" --extras="$(EXTRAS)" \
	    $(if $(VERSION),--version="$(VERSION)") $(if $(filter-out undefined,$(origin MODULES)),--modules="$(MODULES)")

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
