# Two commands do everything on a machine with Python 3.11 or newer: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/stdlib.toml
JOBS ?= 2
RUN := runs/$(basename $(notdir $(RECIPE)))-$(shell date +%Y%m%d-%H%M%S)

.PHONY: train test test-all check docs exact bench bench-quick figures clean

train: $(VENV)/train.done  ## install, and run the main job on one process
	$(BIN)/python -m megabatch train $(RECIPE) --run.folder=$(RUN) $(ARGS)

test: $(VENV)/dev.done  ## install for development, and run every test that catches a planted bug
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not full" --durations=30 --durations-min=4

test-all: $(VENV)/dev.done  ## every test: real kills and restarts, torchrun, browsers, wheels, launchers, examples, the site
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --durations=60 --durations-min=4

check: $(VENV)/dev.done  ## lint, types, and the tests that take seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -m "not slow and not full"

docs: $(VENV)/dev.done  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

exact: $(VENV)/dev.done  ## the full table of exactness; writes tests/exact/result.json
	$(BIN)/python -m tests.exact.full

bench: $(VENV)/bench.done  ## time it beside its peers, and what grows with what; writes benchmarks/results and the tables of docs/benchmarks.md
	$(BIN)/python -m benchmarks.one_microbatch
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.speed $(ARGS)
	$(BIN)/python -m benchmarks.speed --table

bench-quick: $(VENV)/bench.done  ## the headline of the speed tables, on one process; GSM8K=FILE adds its data set
	$(BIN)/python -m benchmarks.speed --quick $(if $(GSM8K),--gsm8k $(GSM8K)) $(ARGS)

figures: $(VENV)/dev.done  ## draw the README's figures from benchmarks/results; RUN=runs/NAME takes the screenshots of its page too
	$(BIN)/python -m benchmarks.figures
	if [ -d "$(RUN)" ]; then $(BIN)/python -m benchmarks.screenshot "$(RUN)"; fi

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/train.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[train]"
	touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/bench.done: $(VENV)/dev.done
	$(BIN)/pip install --quiet -c constraints.txt -e ".[bench]"
	touch $@
