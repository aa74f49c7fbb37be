# make demo: see it run.   make test: all tests.   make check: what to run while editing.   make bench: how fast it is.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= build/bench-venv
BIN := $(VENV)/bin
TEMPLATE := {{cookiecutter.project_slug}}
export PATH := $(abspath $(BIN)):$(PATH)
# Caches stay out of the template folder: whatever lies there is copied into every project rendered from it.
export PYTHONPYCACHEPREFIX := $(abspath build)/pycache
export RUFF_CACHE_DIR := $(abspath build)/ruff
export MYPY_CACHE_DIR := $(abspath build)/mypy
PYTEST := $(BIN)/python -m pytest -o cache_dir='$(abspath build)/pytest'

# Half of the time a test waits for something. Whole files, since those share what they have rendered or started.
IN_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test own-tests check lint types bench

demo: $(VENV)/ready
	$(BIN)/python scripts/demo.py

test: $(VENV)/ready
	$(MAKE) --no-print-directory --jobs --output-sync lint types own-tests
	$(PYTEST) tests $(IN_PARALLEL)

# Those that every generated project has.
own-tests: $(VENV)/ready
	cd '$(TEMPLATE)' && $(abspath $(BIN))/python -m pytest -p no:cacheprovider

check: lint types
	$(PYTEST) tests -m 'not slow' $(IN_PARALLEL)

# In an environment of its own, which holds the others that it is compared with. ARGS='--help' says what there is.
bench: $(BENCH_VENV)/ready
	$(BENCH_VENV)/bin/python benchmarks/training.py $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck '$(TEMPLATE)'/launch_node.sh '$(TEMPLATE)'/launch/{ssh.sh,slurm.sbatch} .ci/run

types: $(VENV)/ready
	cd '$(TEMPLATE)' && mypy --config-file '$(CURDIR)/pyproject.toml' .

# The environments: plain torch from PyPI, and what pyproject.toml's groups "dev" and "bench" name.
$(VENV)/ready: GROUP := dev
$(BENCH_VENV)/ready: GROUP := bench
$(VENV)/ready $(BENCH_VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=...") if sys.version_info < (3, 10) else 0'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --group $(GROUP)
	touch $@
