# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= auto

.PHONY: demo test test-all smoke setup lint tables clean

demo: $(INSTALLED)
	$(BIN)/tilestream demo

# One process a core; tests that need the GPU stay on one of them. JOBS=0: in this process. The tests come in the order
# that tests/lib/collected.py gives them: those first for which a process would wait at the end, those last that are skipped.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

# The same with every case of the tests that `make test` thins out (docs/testing.md).
test-all: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder --all-cases $(PYTEST_ARGS)

# A minute that touches every part, for after an edit.
smoke: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -m smoke $(PYTEST_ARGS)

setup: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

tables: $(INSTALLED)
	$(BIN)/python -m benchmarks.tables.make_tables
	$(BIN)/python -m benchmarks.tables.applications
	$(BIN)/python -m benchmarks.run.mlps --tables
	$(BIN)/python -m benchmarks.tables.kitsune_tables
	$(BIN)/python -m benchmarks.tables.flashfuser_tables
	$(BIN)/python -m benchmarks.tables.conv_tables
	$(BIN)/python -m benchmarks.tables.gnn_tables
	$(BIN)/python -m benchmarks.tables.ragged_tables
	$(BIN)/python -m benchmarks.tables.sparse_tables
	$(BIN)/python -m benchmarks.fit.truth
	$(BIN)/python -m benchmarks.fit.cost_truth
	$(BIN)/python -m benchmarks.tables.features

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .ruff_cache src/*.egg-info

# An old Python is refused here: pip would say so behind 3 GB. Then torch goes first and alone, so that which build of it
# (CPU or CUDA) comes is the machine's choice.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and "set-up: tilestream needs Python 3.11 or later, and $(PYTHON) is %d.%d. Name another: make setup PYTHON=python3.11" % v)'
	@echo "set-up, 1 of 3: a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "set-up, 2 of 3: torch (0.2 GB for a CPU, about 3 GB with CUDA; minutes, once)"
	$(PIP) install torch==2.13.0
	@echo "set-up, 3 of 3: tilestream and what else it needs (about 0.4 GB)"
	$(PIP) install -c constraints.txt -e '.[cuda,dev]'
	@touch $@
	@echo "set-up is done"
