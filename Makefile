# make demo: train a rendered project.  make test: all tests.  make check: lint, types, fast tests.  make bench: speed.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= build/bench-venv
BIN := $(VENV)/bin
TEMPLATE := {{cookiecutter.project_slug}}
export PATH := $(abspath $(BIN)):$(PATH)
# Keep caches out of the template folder: cookiecutter copies every file there into the projects that it renders.
export PYTHONPYCACHEPREFIX := $(abspath build)/pycache
export RUFF_CACHE_DIR := $(abspath build)/ruff
export MYPY_CACHE_DIR := $(abspath build)/mypy
PYTEST := $(BIN)/python -m pytest -o cache_dir='$(abspath build)/pytest'

# Tests wait for half of their time. Distribute whole files, because the tests of a file share what they render or start.
IN_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test own-tests ports check lint types bench

demo: $(VENV)/ready
	$(BIN)/python scripts/demo.py

test: $(VENV)/ready
	$(MAKE) --no-print-directory --jobs --output-sync lint types own-tests
	$(PYTEST) tests $(IN_PARALLEL)

# The tests that every generated project has.
own-tests: $(VENV)/ready
	cd '$(TEMPLATE)' && $(abspath $(BIN))/python -m pytest -p no:cacheprovider

# Programs of others, as the task of a rendered project. `make test` runs them too.
ports: $(VENV)/ready
	$(PYTEST) tests/ports $(IN_PARALLEL)

check: lint types
	$(PYTEST) tests -m 'not slow' $(IN_PARALLEL)

# Has its own environment, which also contains the projects to compare with. ARGS='--help' lists the options.
bench: $(BENCH_VENV)/ready
	$(BENCH_VENV)/bin/python benchmarks/training.py $(ARGS)

# import-linter checks that imports between the rooms of ddp/ run one way: tool.importlinter in pyproject.toml.
lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck '$(TEMPLATE)'/launch_node.sh '$(TEMPLATE)'/launch/{ssh.sh,slurm.sbatch} .ci/run
	cd '$(TEMPLATE)' && lint-imports --config '$(CURDIR)/pyproject.toml' --cache-dir '$(abspath build)/import-linter'

types: $(VENV)/ready
	cd '$(TEMPLATE)' && mypy --config-file '$(CURDIR)/pyproject.toml' .

# The environments: torch from PyPI, and the other packages of the groups "dev" and "bench" in pyproject.toml.
$(VENV)/ready: GROUP := dev
$(BENCH_VENV)/ready: GROUP := bench
$(VENV)/ready $(BENCH_VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=...") if sys.version_info < (3, 10) else 0'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --group $(GROUP)
	touch $@
