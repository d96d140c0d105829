# `make demo` and `make test` do everything from a fresh clone: they make .venv and install what they need into it.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Three processes for every two cores, because many tests wait for other programs.
WORKERS := $(shell $(PYTHON) -c 'import os; print(-(-os.cpu_count() * 3 // 2))')
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# Compiled test files are kept: each of the processes would compile them again, at every run.
unexport PYTHONDONTWRITEBYTECODE
ifndef RUN
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)
endif

.PHONY: demo test test-slow test-soak test-cluster test-all check format bench clean

demo: .venv/.installed
	$(BIN)/trident train glyphs --out $(RUN)
	@echo "Measuring on scripts never seen in training, and making a report:" >&2
	@$(BIN)/trident report $(RUN) --tasks 300 --split test
	@echo "Open $(RUN)/report.html in a browser"

test: .venv/.installed-dev
	$(PYTEST) -m "not slow and not cluster and not soak"

test-slow: .venv/.installed-dev
	$(PYTEST) -m "slow and not cluster"

test-soak: .venv/.installed-dev
	$(PYTEST) -m soak

test-cluster: .venv/.installed-cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed/test_cluster.py tests/data/test_piles.py -k "cluster or parquet" -m "not soak"

test-all: .venv/.installed-cluster
	$(PYTEST) -m "not soak"

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed
	$(BIN)/python -m studies.speed train
	$(BIN)/python -m studies.speed evaluate

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Installs the package with the target's EXTRAS, and marks it by the target's file.
define install
	@echo "Installing into .venv (about a minute, longer if torch must be downloaded) ..." >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trident needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@
endef

.venv/.installed: EXTRAS = analysis
.venv/.installed: pyproject.toml constraints.txt
	$(install)

.venv/.installed-dev: EXTRAS = analysis,dev
.venv/.installed-dev: pyproject.toml constraints.txt
	$(install)
	@touch .venv/.installed

.venv/.installed-cluster: EXTRAS = analysis,dev,cluster
.venv/.installed-cluster: pyproject.toml constraints.txt
	$(install)
	@touch .venv/.installed .venv/.installed-dev
