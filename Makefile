# make demo: see it run.   make test: all tests.   make check: what to run while editing.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEMPLATE := {{cookiecutter.project_slug}}
export PATH := $(abspath $(BIN)):$(PATH)
# Caches stay out of the template folder: whatever lies there is copied into every project rendered from it.
export PYTHONPYCACHEPREFIX := $(abspath build)/pycache
export RUFF_CACHE_DIR := $(abspath build)/ruff
export MYPY_CACHE_DIR := $(abspath build)/mypy
PYTEST := $(BIN)/python -m pytest -o cache_dir='$(abspath build)/pytest'

.PHONY: demo test check lint types

demo: $(VENV)/ready
	$(BIN)/python scripts/demo.py

test: lint types
	$(PYTEST) tests
	cd '$(TEMPLATE)' && $(abspath $(BIN))/python -m pytest -p no:cacheprovider

check: lint types
	$(PYTEST) tests -m 'not slow'

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck '$(TEMPLATE)'/launch_node.sh '$(TEMPLATE)'/launch/{ssh.sh,slurm.sbatch} .ci/run

types: $(VENV)/ready
	cd '$(TEMPLATE)' && mypy --config-file '$(CURDIR)/pyproject.toml' .

# The environment: plain torch from PyPI, and the tools of pyproject.toml's group "dev".
$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=...") if sys.version_info < (3, 10) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	touch $@
