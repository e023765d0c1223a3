# Everything runs in .venv, which is made from requirements.lock on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quick check docs bench clean

# What the tests need beside Python: a browser to open reports with, and real images.
SYSTEM := chromium dataset-fashion-mnist
SYSTEM_READY := $(VENV)/.system

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(SYSTEM_READY): $(READY)
	@dpkg -s $(SYSTEM) >/dev/null 2>&1 \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM) >/dev/null; } \
	  || echo "could not install $(SYSTEM); as root: apt-get update && apt-get install $(SYSTEM)" >&2
	@touch $@

## demo: train, prune, quantise and measure a small network on bundled digits, and say where the report is
demo: $(READY)
	$(BIN)/edge-opt run configs/default.yaml --output out/demo

## test: style, types and the whole suite
test: check $(SYSTEM_READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

## quick: the suite without the slow tests
quick: $(SYSTEM_READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

## check: ruff and mypy
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## docs: the documentation site, in build/site
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

## bench: ratios against other tools in one run; writes benchmarks/results/*.json
bench: $(READY)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
