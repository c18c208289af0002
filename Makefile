# make setup   a virtual environment in .venv with everything (again after a change of what it needs)
# make demo    handwritten digits on two workers of this machine
# make test    the tests (make test-fast: those of milliseconds; make test-slow: those with real processes)
# make check   lint, format, types
# make bench   the benchmarks, each in under a minute
# make chaos   runs in which everything is killed, stopped and cut, and a report of what held (CHAOS_FLAGS=--quick)
# make docs    the documents, to build/docs: links, the table of settings, the notebook, warnings are errors
# make newcomer   README.md to the letter, in an empty clone (NEWCOMER_FLAGS=--borrow: with the packages of .venv)

# constraints.txt pins torch. For another build (CUDA), install it into .venv before or after: pip keeps what fits.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
DOCS := .venv/.docs
PYTEST = $(BIN)/python -m pytest -q -n 3 --dist worksteal
DEMO_FLAGS ?=
CHAOS_FLAGS ?=
NEWCOMER_FLAGS ?=

.PHONY: setup demo test test-fast test-slow check bench chaos docs newcomer clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[plot,dashboard,tensorboard,examples,dev]'
	touch $@

demo: setup
	$(BIN)/python -m w5xde_async.coordinator examples/digits.py:job --workers 2 --name digits --resume never --port 0 $(DEMO_FLAGS)

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m 'not slow'

test-slow: setup
	$(PYTEST) -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	for bench in bench/[a-z]*.py; do grep -q -e --quick $$bench || continue; echo "== $$bench"; $(BIN)/python $$bench --quick || exit 1; done

chaos: setup
	$(BIN)/python bench/chaos.py $(CHAOS_FLAGS)

docs: $(DOCS)
	$(BIN)/python docs/check_links.py
	$(BIN)/python docs/make_settings.py --check
	$(BIN)/python docs/notebooks/make.py --check
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

newcomer: setup
	$(BIN)/python tests/newcomer.py $(NEWCOMER_FLAGS)

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
