# The front door. `make demo` and `make test` set up what they need; both can be run again at any time.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow bench reproduce lint docs format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## install into .venv with pinned versions

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' on the PATH. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: ibnn needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version). Name another: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot make virtual environments. Install its venv package (Debian: apt install python3-venv)."; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; takes a minute or two) …"
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' || { echo "make: a package could not be installed. Is the package index reachable? See the message above."; exit 1; }
	@touch $@

demo: $(STAMP) ## train a plain network and an iBNN on embedded digits, show a table and figures
	@$(RUN) -m ibnn demo --out demo

test: $(STAMP) ## all tests but the slow ones
	@$(RUN) -m pytest -q -n 2

test-slow: $(STAMP) ## the slow tests
	@$(RUN) -m pytest -q -m slow

bench: $(STAMP) ## what fit adds to a step, steering to a run, a second worker brings, loading takes; ratios to the plain network
	@set -e; settings="$$($(RUN) tests/bf16.py)"; for name in fit_overhead steering scaling loading; do \
		env $$settings $(RUN) benchmarks/$$name.py; done; env $$settings $(RUN) benchmarks/bench.py

reproduce: $(STAMP) ## run an experiment of the paper into experiments/results: make reproduce NAME=benchmark; without NAME, a list
	@$(RUN) experiments/reproduce.py $(NAME) $(OPTIONS)

lint: $(STAMP) ## ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

docs: $(STAMP) ## compare the pages' numbers with the result files, make HTML in docs/_build
	@$(RUN) docs/check_numbers.py
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@rm -rf docs/_build
	@$(RUN) -m sphinx -q -W --keep-going docs docs/_build
	@echo "docs/_build/index.html"

format: $(STAMP) ## let ruff format the code
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

clean: ## remove what was set up or made
	rm -rf $(VENV) demo build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
