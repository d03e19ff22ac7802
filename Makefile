# `make train` runs the main job, `make test` passes the tests. Both need nothing but Python 3.11+ and make.

PYTHON ?= python3
VENV ?= .venv
# More of the command line, for example: make train ARGS="--strategy wp --link 100mbit"
ARGS ?=
# Processes that share the tests, a file at a time. Tests of several ranks start more.
PROCESSES ?= 3

# Where it is set, every process would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PINNED := $(VENV)/.pinned
READY := $(VENV)/.ready

# Laws of every part that take a second or less each: together they enter most of the library. None starts a rank in a
# process of its own, for which pytest would first import what ranks need.
LAWS := tests/flat tests/fields tests/style $(addprefix tests/, \
	checkpoint/test_rollback.py checksums/test_checksums.py checksums/test_together.py cli/test_mistakes.py docs/test_links.py \
	docs/test_readme.py echo/test_plans.py engine/test_alike.py engine/test_course.py errors/test_construction.py \
	errors/test_order.py errors/test_wrong_options.py exactness/test_clock.py exactness/test_hidden.py \
	exactness/test_total.py exchange/test_rows.py exchange/test_wires.py groups/test_collectives.py \
	guards/test_promises.py local/test_algorithm.py loops/test_gradients.py optimizer/test_gradient.py \
	optimizer/test_preview.py optimizer/test_whole.py paft/test_average.py plan/test_links.py strategies/test_quotas.py \
	strategies/test_shapes.py)

.PHONY: setup train check test test-all laws types layers site behaviour format clean

setup: $(READY)

train: $(READY)
	$(BIN)/stretto train stdlib-gpt $(ARGS)

# For every commit; `make test` holds every law, with a quarter of its draws.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 laws types layers

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 behaviour types layers site  # mypy alone would leave a core idle

# Every draw and everything that runs long, from seeds of the day on: each night, and before a release.
test-all: export STRETTO_TESTS = all
test-all: export STRETTO_FIRST_SEED ?= $(shell date +%y%j)00
test-all: test

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

# Into build/site/index.html. Any warning is an error: a link into the void, a page without a place, a public name without one.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet it would not see warnings

laws: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile $(LAWS)

behaviour: $(READY)
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --junitxml build/tests.xml

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made again from nothing when the pins change, so that no package of an older list stays behind.
$(PINNED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --requirement requirements.txt
	@touch $@

$(READY): $(PINNED) pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
