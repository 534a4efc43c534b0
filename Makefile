# The commands people type. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= demo
# Test files that run at the same time.
JOBS ?= 2
# Waiting threads soon sleep instead of spinning: tests and loaders run several processes on the same cores.
export GOMP_SPINCOUNT ?= 2000
.PHONY: help env demo test test-exhaustive test-quick test-adapters check format docs clean

help:  ## Say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/megafold: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable '.[train]'
	@touch $@

env: $(BIN)/megafold  ## Make .venv with everything in it

demo: env  ## Sample corpus, build, verify, stream, train; pictures in demo/
	$(BIN)/python -m megafold.demo $(DEMO)

test: env check  ## Linters, types, import directions, tests
	$(BIN)/python -m pytest -q -m 'not exhaustive' --numprocesses $(JOBS) --dist loadfile --durations=15

test-exhaustive: env  ## What make test leaves out: 500 components of the dictionary, tiles of tables
	$(BIN)/python -m pytest -q -m exhaustive

test-quick: env  ## The tests without the slow ones
	$(BIN)/python -m pytest -q -m 'not slow'

test-adapters: env  ## Train the peers' real models on our samples; an environment for each
	$(BIN)/python tests/adapters/prove.py

check: env  ## Linters, types and import directions alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env  ## Format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env  ## Write docs/features.md from the schema
	$(BIN)/python -m megafold.pipeline.schema_docs docs/features.md

clean:  ## Remove what the commands above made, the environment apart
	rm -rf $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
