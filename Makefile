# `make demo` shows the product, `make check` is what people, hooks and CI run. Both set up .venv first.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
# Pinned, and installed first: a later unpinned torch would pull gigabytes of CUDA on Linux.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo check format lint types test clean

demo: $(VENV)/.installed
	$(BIN)/mars-export demo

check: lint types test

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy cannot see a package that is mapped onto the root, so it gets a link named like the package.
types: $(VENV)/.installed
	mkdir -p build/typing
	ln -sfn "$(CURDIR)" build/typing/mars_export
	MYPYPATH=build/typing $(BIN)/mypy -p mars_export.runtime -p mars_export.calibration -p mars_export.exporter -p mars_export.cli

test: $(VENV)/.installed
	$(BIN)/python -m pytest

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,export,calibrate,rtx,dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
