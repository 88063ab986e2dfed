# Needs Python 3.10 or later, make and git; everything else is installed into .venv.
#   make demo    the main job on real servers (DATA=orders.csv takes your own order numbers)
#   make test    all tests
#   make lint    ruff, mypy, import-linter
#   make bench   the figures of the README

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
DATA ?=
PYTEST_ARGS ?=
# Absolute, so that the targets work from whatever folder make is called in (make -C …).
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: setup demo test lint format bench debian-servers clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "taskguard needs Python 3.10 or later, $(PYTHON) is " + sys.version.split()[0])'
	@echo "setting up $(VENV) (once; a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	@$(BIN)/python -m taskguard.testing.demo $(if $(DATA),--data '$(DATA)')

test: setup debian-servers
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

bench: setup
	@$(BIN)/python -m benchmarks

# Servers that no wheel carries. Only where apt works as root; tests that need them skip elsewhere.
debian-servers:
	@.ci/debian-servers

clean:
	@rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
