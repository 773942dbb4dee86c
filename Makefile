# `make demo` and `make test` need Python 3.11 and make, nothing else: the environment is created here.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST_ARGS ?=
PYTHON_GPU ?= python3
GPU_ARGS ?=
ISA ?=
SOAK_ARGS ?= --minutes 10
FUZZ_ARGS ?= --decoders 45000 --sockets 3000 --files 2000

# The environment is rebuilt when what it is made from changes; its stamp carries a checksum of that.
SOURCES := pyproject.toml constraints.txt packages/sinew-client/pyproject.toml
READY := $(VENV)/ready-$(shell cat $(SOURCES) | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
CLIENTS := .venv-clients
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help demo demo-full eval soak fuzz test test-kernels test-isa test-all lint format bench gpu env clients roles docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## the trained demo policy in closed loop, through server and client
	$(BIN)/sinew demo --out build/demo

demo-full: $(READY) ## a random full-size policy: convert, serve, drive over a socket
	$(BIN)/sinew demo --full-size --out build/full-size

eval: $(READY) ## 200 episodes of the demo policy, with intervals
	$(BIN)/sinew eval sinew/assets/blocks.gguf --episodes 200 --out build/eval

sim-%: $(READY) ## a simulator in an interpreter of its own: sim-aloha sim-pusht sim-metaworld sim-libero
	$(BIN)/sinew eval --setup $*

# One compute thread per worker: more threads than cores would spin against each other. Files in their order: xdist's
# own puts those of few, long tests last, and one worker waits.
test: $(READY) ## all tests that need no full-size weights
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not kernels" $(PYTEST_ARGS)

test-kernels: $(READY) ## Triton kernels, interpreted and compiled for sm_80, sm_89 and sm_90; CPU kernels of other processors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --timeout 1600 -m "kernels and not slow and not gpu" \
		tests/engine/cuda tests/engine/cpu tests/cli $(PYTEST_ARGS)

test-isa: $(READY) ## what depends on arithmetic, under each instruction set that is here: ISA="lowest native" for some
	$(BIN)/python -m tests.isa --workers $(WORKERS) $(ISA)

test-all: $(READY) ## full-size tests too
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite the code the way `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## time the demo's policy, stage by stage
	$(BIN)/sinew demo --full-size --out build/full-size --prepare
	$(BIN)/sinew bench build/full-size/policy.gguf

soak: $(READY) ## ten robots beside attackers for ten minutes, on the native wire; then the long fault injections
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)
	$(BIN)/python -m pytest -q tests/serve/test_faults.py --faults-rounds 10

fuzz: $(READY) ## hostile inputs for all decoders, sockets and files: a million take about an hour of a core
	$(BIN)/python -m tests.hostile.fuzz $(FUZZ_ARGS)

# That machine has no network and its own torch: no environment is made, a checkout is enough (docs/gpu.md).
gpu: ## on a machine with an NVIDIA GPU: correctness, kernels, the ladder of engines; ten minutes
	PYTHONPATH=. $(PYTHON_GPU) -m benchmarks.gpu $(GPU_ARGS)

env: $(READY) ## create the environment only

# LeRobot's RobotClient wants other versions of what the project uses, so it lives apart; torch is ours.
clients: $(READY) ## LeRobot's own client, for the conformance test of its wire (650 MB)
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q --no-deps -r packages/clients.txt
	$(BIN)/python -c '$(SITE)' > "$$($(CLIENTS)/bin/python -c '$(SITE)')/sinew.pth"

roles: $(READY) ## wheels into empty environments, one per role, and the README's commands in them (minutes, 2 GB)
	$(BIN)/python -m tests.roles

docs: $(READY) ## the documentation as a site: build/site/index.html
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt mkdocs
	$(BIN)/mkdocs build --strict

$(READY): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which with make PYTHON=..."; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	# torch first and pinned: a plain install of the rest could pull another build of it.
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation \
		-e ./packages/sinew-client -e '.[dev,sim]'
	# The real client of a wire that tests talk to. Its metadata asks for numpy below 2, its code does not.
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps openpi-client==0.1.2
	@touch $@

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(CLIENTS) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
