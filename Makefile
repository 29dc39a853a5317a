# The two commands of the README. Everything else is a tool you may run inside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q

.PHONY: demo test docs clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing Steelyard into $(VENV) (a few minutes the first time: torch alone is about 200 MB)"
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the development tools into $(VENV)"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/installed ## Train a small model on real documents, packed and balanced, and show the difference.
	$(BIN)/steelyard demo

test: $(VENV)/installed-dev ## All checks: style, types, import graph, tests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -n logical --maxprocesses 2

docs: $(VENV)/installed-dev ## Build the documentation into site/.
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist steelyard-demo
