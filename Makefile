# make demo: train a rendered project.  make check: lint, types, fast tests.  make bench: speed.
# make test: each behaviour once, in 10 minutes.  make test-all: then all that enumerates, and the oldest and newest torch.
# make gpu: what only a GPU can settle.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= build/bench-venv
VERSIONS ?= build/versions
OLDEST_PYTHON ?= 3.10
NEWEST_PYTHON ?= 3.13
BIN := $(VENV)/bin
TEMPLATE := {{cookiecutter.project_slug}}
export PATH := $(abspath $(BIN)):$(PATH)
# Keep caches out of the template folder: cookiecutter copies every file there into the projects that it renders.
export PYTHONPYCACHEPREFIX := $(abspath build)/pycache
# Without a cache, each of the hundreds of processes that the tests start compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
export RUFF_CACHE_DIR := $(abspath build)/ruff
export MYPY_CACHE_DIR := $(abspath build)/mypy
PYTEST := $(BIN)/python -m pytest -o cache_dir='$(abspath build)/pytest'

# Tests wait for half of their time, so two cores carry four workers. Distribute whole files, because the tests of a
# file share what they render or start.
IN_PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all own-tests ports check lint types bench versions versions-oldest versions-newest gpu

demo: $(VENV)/demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/ready
	$(MAKE) --no-print-directory --jobs --output-sync lint types
	@# Those of the template are those that every generated project has.
	$(PYTEST) tests '$(TEMPLATE)/tests' $(IN_PARALLEL)

# What enumerates: each state of the disk, each operation, all ports, examples and benchmarks. `make test` has a sample
# of each; SEED=... chooses another one.
test-all: test
	$(PYTEST) tests $(IN_PARALLEL) --all -m sample
	$(MAKE) --no-print-directory versions

# The tests of the template: as their owner runs them.
own-tests: $(VENV)/ready
	cd '$(TEMPLATE)' && $(abspath $(BIN))/python -m pytest -p no:cacheprovider

# Programs of others, as the task of a rendered project. `make test` runs them too.
ports: $(VENV)/ready
	$(PYTEST) tests/ports $(IN_PARALLEL)

check: lint types
	$(PYTEST) tests -m 'not slow' $(IN_PARALLEL)

# What only a GPU can settle: a few minutes on one GPU, no downloads. Writes the answers as a table to build/gpu.md.
gpu: $(VENV)/ready
	$(PYTEST) tests/gpu -rs

# Has its own environment, which also contains the projects to compare with. ARGS='--help' lists the options.
bench: $(BENCH_VENV)/ready
	$(BENCH_VENV)/bin/python benchmarks/training.py $(ARGS)

# The tests of a rendered project, each in an environment of its own (about 5 GB): with the lowest versions that its
# pyproject.toml allows, and with the newest. OLDEST_PYTHON and NEWEST_PYTHON are versions or paths.
versions: versions-oldest versions-newest
versions-oldest: RESOLUTION := lowest-direct
versions-oldest: TESTED_PYTHON = $(OLDEST_PYTHON)
versions-newest: RESOLUTION := highest
versions-newest: TESTED_PYTHON = $(NEWEST_PYTHON)
versions-oldest versions-newest: FOLDER = $(abspath $(VERSIONS))/$@
versions-oldest versions-newest: UV := $(abspath $(VERSIONS))/tools/bin/uv
versions-oldest versions-newest: $(VERSIONS)/tools/ready
	rm -rf '$(FOLDER)'
	$(VERSIONS)/tools/bin/cookiecutter --no-input --output-dir '$(FOLDER)' . project_slug=project >/dev/null
	'$(UV)' venv --quiet --python '$(TESTED_PYTHON)' '$(FOLDER)/venv'
	cd '$(FOLDER)/project' && '$(UV)' pip install --quiet --python ../venv --resolution $(RESOLUTION) -r pyproject.toml --group dev
	'$(UV)' pip list --python '$(FOLDER)/venv' | grep '^torch'
	cd '$(FOLDER)/project' && ../venv/bin/python -m pytest -p no:cacheprovider

$(VERSIONS)/tools/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet uv 'cookiecutter>=2.6'
	touch $@

# import-linter checks that imports between the rooms of ddp/ run one way: tool.importlinter in pyproject.toml.
lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck '$(TEMPLATE)'/launch_node.sh '$(TEMPLATE)'/launch/{ssh.sh,slurm.sbatch} .ci/run
	cd '$(TEMPLATE)' && lint-imports --config '$(CURDIR)/pyproject.toml' --cache-dir '$(abspath build)/import-linter'

types: $(VENV)/ready
	cd '$(TEMPLATE)' && mypy --config-file '$(CURDIR)/pyproject.toml' .

# The environments: torch from PyPI, and the other packages of the groups in pyproject.toml. `make test` adds its own to
# those of `make demo`.
$(VENV)/demo: GROUP := demo
$(VENV)/ready: GROUP := dev
$(BENCH_VENV)/ready: GROUP := bench
$(VENV)/demo $(VENV)/ready $(BENCH_VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=...") if sys.version_info < (3, 10) else 0'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --group $(GROUP)
	touch $@
