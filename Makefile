# make demo: train a rendered project.  make check: lint, types, fast tests.  make bench: speed.
# make test: each behaviour once, in 10 minutes.  make test-all: then what enumerates or costs most, and three versions of torch.
# make gpu: what only a GPU can settle.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= build/bench-venv
VERSIONS ?= build/versions
# Versions of Python, or paths
OLDEST_PYTHON ?= 3.10
MIDDLE_PYTHON ?= 3.12
NEWEST_PYTHON ?= 3.13
MIDDLE_TORCH ?= 2.12
BIN := $(VENV)/bin
TEMPLATE := {{cookiecutter.project_slug}}
export PATH := $(abspath $(BIN)):$(PATH)
# Keep caches out of the template folder: cookiecutter copies every file there into the projects that it renders.
export PYTHONPYCACHEPREFIX := $(abspath build)/pycache
# Without a cache, each of the hundreds of processes that the tests start compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHON # launch_node.sh would take it for the Python with torch
export RUFF_CACHE_DIR := $(abspath build)/ruff
export MYPY_CACHE_DIR := $(abspath build)/mypy
PYTEST := $(BIN)/python -m pytest -o cache_dir='$(abspath build)/pytest'

# Tests wait for half of their time, so two cores carry six workers. Distribute whole files, because the tests of a
# file share what they render or start.
IN_PARALLEL := --numprocesses 6 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all own-tests ports check lint types bench versions versions-oldest versions-middle versions-newest gpu

demo: $(VENV)/demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/ready
	@# The tests of the template are those that every generated project has.
	$(MAKE) --no-print-directory --jobs --output-sync lint types & checks=$$!; \
	$(PYTEST) tests '$(TEMPLATE)/tests' $(IN_PARALLEL); code=$$?; wait $$checks && exit $$code

# What enumerates: each state of the disk, each operation, all ports, examples and benchmarks; and what costs most while
# another test proves most of it. `make test` has a sample of many; SEED=... chooses another one. The rest follows here.
test-all: test
	@# These wait for longer: a seventh worker.
	$(PYTEST) tests $(IN_PARALLEL) --left-out --numprocesses 7
	$(MAKE) --no-print-directory versions

# The tests of the template: as their owner runs them.
own-tests: $(VENV)/ready
	cd '$(TEMPLATE)' && $(abspath $(BIN))/python -m pytest -p no:cacheprovider

# Programs of others, as the task of a rendered project. `make test-all` runs them too.
ports: $(VENV)/ready
	$(PYTEST) tests/ports $(IN_PARALLEL) --all

check: lint types
	$(PYTEST) tests -m 'not slow' $(IN_PARALLEL)

# What only a GPU can settle: a few minutes on one GPU, no downloads. Writes the answers as a table to build/gpu.md.
gpu: $(VENV)/ready
	$(PYTEST) tests/gpu -rs

# Has its own environment, which also contains the projects to compare with. ARGS='--help' lists the options.
bench: $(BENCH_VENV)/ready
	$(BENCH_VENV)/bin/python benchmarks/training.py $(ARGS)

# The tests of a rendered project, with the lowest versions that its pyproject.toml allows, with a torch in between, and
# with the newest versions. The three environments are made once for each pyproject.toml: 17 GB, which uv's cache shares.
VERSIONS_TESTED := oldest middle newest
RENDER = rm -rf '$(VERSIONS)/$*/project' && '$(VERSIONS)/tools/bin/cookiecutter' --no-input --output-dir '$(VERSIONS)/$*' . \
  project_slug=project >/dev/null
versions: $(VERSIONS_TESTED:%=$(VERSIONS)/%/ready)
	$(MAKE) --no-print-directory --jobs 3 --keep-going --output-sync $(VERSIONS_TESTED:%=versions-%)

$(VERSIONS_TESTED:%=versions-%): versions-%: $(VERSIONS)/%/ready
	$(RENDER)
	grep . '$(VERSIONS)/$*/ready'
	cd '$(VERSIONS)/$*/project' && ../venv/bin/python -m pytest -p no:cacheprovider

$(VERSIONS)/oldest/ready: TESTED_PYTHON = $(OLDEST_PYTHON)
$(VERSIONS)/oldest/ready: INSTALL := --resolution lowest-direct
$(VERSIONS)/middle/ready: TESTED_PYTHON = $(MIDDLE_PYTHON)
$(VERSIONS)/middle/ready: INSTALL = 'torch==$(MIDDLE_TORCH).*'
$(VERSIONS)/newest/ready: TESTED_PYTHON = $(NEWEST_PYTHON)
$(VERSIONS)/newest/ready: INSTALL := --resolution highest
$(VERSIONS_TESTED:%=$(VERSIONS)/%/ready): UV = $(abspath $(VERSIONS))/tools/bin/uv
$(VERSIONS_TESTED:%=$(VERSIONS)/%/ready): $(VERSIONS)/%/ready: $(TEMPLATE)/pyproject.toml | $(VERSIONS)/tools/ready
	$(RENDER)
	@# uv finds the Pythons of pyenv by their paths, and not by pyenv's shims. It downloads a Python that is missing.
	export PATH="$$(printf '%s:' "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin)$$PATH"; \
	'$(UV)' venv --quiet --clear --python '$(TESTED_PYTHON)' '$(@D)/venv' || { \
	  '$(UV)' venv --quiet --clear --python '$(VERSIONS)/tools/bin/python' '$(@D)/venv' && \
	  echo 'warning: there is no Python $(TESTED_PYTHON) here: the $* versions are tested with that of $(PYTHON)'; }
	cd '$(@D)/project' && '$(UV)' pip install --quiet --python ../venv $(INSTALL) -r pyproject.toml --group dev
	{ '$(@D)/venv/bin/python' --version; '$(UV)' pip list --quiet --python '$(@D)/venv' | grep '^torch'; } >'$@.new'
	mv '$@.new' '$@'

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
	MYPYPATH='$(TEMPLATE):$(TEMPLATE)/tests:benchmarks' mypy benchmarks scripts hooks

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
