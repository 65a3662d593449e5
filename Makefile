# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test setup lint tables clean

demo: $(INSTALLED)
	$(BIN)/tilestream demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

setup: $(INSTALLED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

tables: $(INSTALLED)
	$(BIN)/python benchmarks/make_tables.py
	$(BIN)/python benchmarks/kitsune_tables.py
	$(BIN)/python benchmarks/sparse_tables.py
	$(BIN)/python benchmarks/truth.py
	$(BIN)/python benchmarks/cost_truth.py

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .ruff_cache src/*.egg-info

# torch goes first and alone, so that which build of it (CPU or CUDA) comes is the machine's choice.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cuda,dev]'
	touch $@
