# Needs make and a Python of at least 3.11; everything else goes into .venv at the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Marks of how far the environment is: as the demonstration needs it, and with the tools for the rest.
PLAIN := $(VENV)/plain
READY := $(VENV)/ready

.PHONY: help install demo test test-all bench lint format package clean

help:
	@echo "make demo      train on the digits with and without comhe, print the comparison"
	@echo "make test      the test suite; one file: $(BIN)/pytest tests/test_NAME.py"
	@echo "make test-all  the same and then the longer tests"
	@echo "make bench     the measurements that defaults were read off"
	@echo "make lint      ruff and mypy; make format mends what ruff can"
	@echo "make package   build wheel and sdist, install and import each"
	@echo "make clean     remove what the above made, .venv included"

install: $(READY)

# torch comes first and pinned, so that no other package's open range chooses the build. Without build isolation
# the project is built by the pinned setuptools.
$(PLAIN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "comhe needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": name a later one, make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" setuptools
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

$(READY): $(PLAIN)
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(PLAIN)
	$(BIN)/python examples/digits.py

# A process a core, and each on one thread: two that use both cores would wait for each other. At most eight, as each
# begins by importing PyTorch.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test: $(READY)
	$(PYTEST) -m "not slow"

# In one call with `test`, make runs that part once.
test-all: test
	$(PYTEST) -m slow

bench: $(PLAIN)
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: $(READY)
	sh .ci/package $(BIN)/python

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
