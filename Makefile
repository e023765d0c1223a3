# Everything runs in .venv, which is made on first use: from requirements/run.lock for the demo, with requirements/dev.lock
# on top for all else. `make clean` and `make PYTHON=/usr/bin/python3.12 demo` make it with another Python.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
RUN_READY := $(VENV)/.run
DEV_READY := $(VENV)/.dev

# Packages are installed without bytecode. Unless Python may write it, every process would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick coverage check docs pages bench clean

# What the tests need beside Python: a browser to open reports with, real images, an ssh server as a board,
# and a compiler for the files of a firmware.
SYSTEM := chromium dataset-fashion-mnist g++ openssh-server
SYSTEM_READY := $(VENV)/.system

$(RUN_READY): requirements/run.lock pyproject.toml
	@$(PYTHON) scripts/install.py $(VENV) requirements/run.lock --project .
	@touch $@

$(DEV_READY): $(RUN_READY) requirements/dev.lock
	@$(BIN)/python scripts/install.py $(VENV) requirements/dev.lock
	@touch $@

$(SYSTEM_READY): $(DEV_READY)
	@dpkg -s $(SYSTEM) >/dev/null 2>&1 \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM) >/dev/null; } \
	  || echo "could not install $(SYSTEM); as root: apt-get update && apt-get install $(SYSTEM)" >&2
	@touch $@

## demo: train, prune, quantize and measure a small network on bundled digits, and say where the report is
demo: $(RUN_READY)
	$(BIN)/edge-opt run configs/default.yaml --output out/demo

# Three processes on two cores: many tests wait for others that they started. A file stays in one process, which makes
# what its tests share once.
PYTEST := -m pytest -n 3 --dist loadfile --no-loadscope-reorder
## test: style, types and the whole suite
test: check $(SYSTEM_READY)
	$(BIN)/python $(PYTEST)

## quick: the suite without the slow tests
quick: $(SYSTEM_READY)
	$(BIN)/python $(PYTEST) -m "not slow"

## coverage: the whole suite, and which lines it does not run
coverage: $(SYSTEM_READY)
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing --fail-under 95

## check: ruff, mypy, and whether Python 3.10 has everything that is used
check: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --eval-annotations --target=3.10- src

## docs: the documentation site, in build/site
docs: $(DEV_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The samples come last: they show what the pages before them describe. Two writers are left out: the picture of a report
# needs a browser, and the bundled nets, which are data of the package, need torchvision.
PAGE_WRITERS := $(filter-out %/write_samples.py %/write_report_picture.py %/write_bundled_nets.py,$(wildcard scripts/write_*.py)) \
  scripts/write_samples.py
## pages: write every generated page of README and docs anew, about 5 minutes
pages: $(DEV_READY)
	@for writer in $(PAGE_WRITERS); do echo $$writer; $(BIN)/python $$writer || exit 1; done

## bench: ratios against other tools in one run; writes benchmarks/results/*.json
bench: $(DEV_READY)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
