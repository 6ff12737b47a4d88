# make tune: set up .venv, tune a kernel for a GPU that need not be here.   make test: set up .venv, run every check.
PYTHON ?= python3
GPU ?= a100
TRIALS ?= 40

BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: tune test clean

tune: .venv/installed
	$(BIN)/flashsmith tune --gpu $(GPU) --dtype bf16 --d 128 --causal --pass both --trials $(TRIALS)

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[cuda13]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[cuda13,dev]'
	touch $@

clean:
	rm -rf .venv
