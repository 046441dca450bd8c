# make test   install into .venv, lint, run the tests
# make demo   install into .venv, trace a small model, simulate the policies, draw two plots under demo/
# make lint | types | wheel | clean
#
# PYTHON=python3.12 chooses the interpreter. Your pip settings (index, proxy, cache) are used as they are.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test demo lint types wheel clean

# the models of tests and demonstration are too small for more
test demo: export OMP_NUM_THREADS ?= 1

# hundreds of processes load the same modules
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.dev lint
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

demo: $(VENV)/.trace
	$(BIN)/python -m experiments.demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

# a stamp, because an interrupted venv has a python and no pip
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "oledsim needs Python 3.11 or later, found $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install the package python3-venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# one stamp for each set of extras; a changed pin or dependency installs anew
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.made
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build dist demo outputs multirun *.egg-info .pytest_cache .ruff_cache .hypothesis
