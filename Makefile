PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: help setup serve test check clean

help:
	@echo "make serve [ARGS='MODEL --port 8000']   start the server, with the demo model by default"
	@echo "make test [ARGS='-k name']              run the tests"
	@echo "make check                              ruff, mypy and the import contracts"
	@echo "make setup                              only the environment, in $(VENV)"
	@echo "make clean                              remove the environment and what the tools left behind"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Specter needs Python 3.11 or newer, and this is " \
		+ sys.version.split()[0] + "; name another one with `make PYTHON=python3.12 ...`")'
	@echo "Setting up the environment in $(VENV); the first time this takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[demo,dev]'
	@touch $@

serve: setup
	@exec $(BIN)/specter serve $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find engine server tests -name __pycache__ -prune -exec rm -rf {} +
