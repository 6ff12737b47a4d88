# make tune: set up .venv, tune a kernel for a GPU that need not be here.   make test: set up .venv, run every check.
# make records: search the tiles that are shipped in tuned/ anew; what is there and fresh is kept.
# make fuzz: 300 random problems with random tiles on the emulator; SEED names others.
# make gpu: on a machine with a GPU, seven minutes: test, tune, bench and measure there; report.json and report.md in OUT.
PYTHON ?= python3
GPU ?= a100
OUT ?= gpuday
TRIALS ?= 60
SEED ?= 0

BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: tune test fuzz gpu records clean

tune: .venv/installed
	$(BIN)/flashsmith tune --gpu $(GPU) --dtype bf16 --d 128 --causal --pass both --trials $(TRIALS)

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

fuzz: .venv/installed
	$(BIN)/python tools/fuzz.py --count 300 --seed $(SEED)

records: .venv/installed
	$(BIN)/python tools/ship_records.py

# With .venv if it is there, else with the Python that is: a borrowed machine may have no network to install from.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_day.py --out $(OUT)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[cuda13]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[cuda13,dev]'
	touch $@

clean:
	rm -rf .venv
