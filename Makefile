# Everything starts from a fresh clone and Python 3.11 to 3.13: `make demo`, `make test`. ARGS="…" is handed on.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo test test-slow coverage lint format bench matrix clean

VENV ?= .venv
ARGS ?=
WORKERS ?= 2
CHECKED := actors sqlstreams tests benchmarks
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
export PIP_ROOT_USER_ACTION := ignore

help: ## what there is
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(VENV)/.run ## a Postgres of its own, 20,000 payments, one killed process, nothing lost
	@$(BIN)/sqlstreams demo $(ARGS)

test: $(VENV)/.dev ## all tests that take less than 5 s each
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(VENV)/.dev ## the others: many rounds of kill -9, large volumes
	@$(BIN)/python -m pytest --slow -m slow $(ARGS)

coverage: $(VENV)/.dev ## 100 % of the branches of actors/ and sqlstreams/model/
	@$(BIN)/python -m coverage run -m pytest $(wildcard tests/unit tests/actors tests/simulation) $(ARGS)
	@$(BIN)/python -m coverage report --include='actors/*,sqlstreams/model/*' --fail-under=100

lint: $(VENV)/.dev ## format, rules, types, import contracts
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/ruff format --check --quiet $(CHECKED)
	@$(BIN)/flake8 $(CHECKED)
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev ## let ruff write
	@$(BIN)/ruff check --fix --quiet $(CHECKED) || true
	@$(BIN)/ruff format --quiet $(CHECKED)

bench: $(VENV)/.dev ## throughput and latency, beside a baseline without this library
	@$(BIN)/python -m benchmarks throughput $(ARGS)
	@$(BIN)/python -m benchmarks latency $(ARGS)

matrix: ## the tests on Python 3.11 3.12 3.13 x Postgres 15 18 x oldest and newest packages
	@.ci/matrix $(ARGS)

clean: ## remove what was made here
	@rm -rf $(VENV) .matrix build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made anew when pyproject.toml changes, and when it was moved or copied or no longer runs.
$(shell test "$$(cat $(VENV)/.run 2>&1)" = "$(CURDIR)" && $(BIN)/python -c '' 2>&1 || rm -f $(VENV)/.run $(VENV)/.dev)

# An interpreter on the PATH may be too new, lack venv, or be a version manager's stub that fails: each is tried.
$(VENV)/.run: pyproject.toml
	@python=; \
	for name in $${PYTHON:-python3.13 python3.12 python3.11 python3}; do \
	  if $$name -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; \
	  then python=$$name; break; fi; \
	done; \
	test -n "$$python" || { echo "No Python 3.11, 3.12 or 3.13 with venv was found; name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "Making $(VENV) with $$($$python --version); this happens once"; \
	$$python -m venv --clear $(VENV)
	@$(PIP) install --editable '.[embedded]'
	@echo "$(CURDIR)" >$@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing what tests and checks need; this happens once"
	@$(PIP) install --editable '.[dev]'
	@touch $@
