# constraints.txt pins torch. For another build (CUDA), install it into .venv before or after: pip keeps what fits.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
DOCS := .venv/.docs
# Without what is compiled once, every process of the tests compiles everything that it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --dist worksteal
DEMO_FLAGS ?=
CHAOS_FLAGS ?=
NEWCOMER_FLAGS ?=

.PHONY: help setup demo test test-slow check format build bench chaos docs newcomer clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## a virtual environment in .venv with everything

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[plot,dashboard,tensorboard,examples,models,lightning,ray,dev]'
	touch $@

demo: setup ## train a model of handwritten digits with two workers on this machine
	$(BIN)/python -m w5xde_async.coordinator examples/digits.py:job --workers 2 --name digits --resume never --port 0 $(DEMO_FLAGS)

test: setup ## the tests, but for those that take long; where CI is set, as .ci/run does, all of them
	$(PYTEST) $(if $(CI),,-m 'not slow')

test-slow: setup ## the others: real processes and sockets, seconds each
	$(PYTEST) -m slow

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## format the code, and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: setup ## a wheel and a source distribution in dist/
	$(BIN)/python -m hatchling build

bench: setup ## the benchmarks, each in about a minute
	for bench in bench/[a-z]*.py; do grep -q -e --quick $$bench || continue; echo "== $$bench"; $(BIN)/python $$bench --quick || exit 1; done

chaos: setup ## runs in which everything is killed, stopped and cut; a report of what held (CHAOS_FLAGS=--quick)
	$(BIN)/python bench/chaos.py $(CHAOS_FLAGS)

docs: $(DOCS) ## the documents as a site in build/docs; warnings are errors
	$(BIN)/python docs/check_links.py
	$(BIN)/python docs/make_settings.py --check
	$(BIN)/python docs/make_rooms.py --check
	$(BIN)/python docs/notebooks/make.py --check
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

newcomer: setup ## follow README.md to the letter in an empty clone (NEWCOMER_FLAGS=--borrow: with the packages of .venv)
	$(BIN)/python tests/newcomer.py $(NEWCOMER_FLAGS)

clean: ## remove everything that make has made
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
