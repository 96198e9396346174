# The verbs of this project. Every one sets up the environment first (quick when it is there).

.PHONY: help setup demo test check nightly bench clean
.DEFAULT_GOAL := help

bin := .venv/bin
# Tests that need no engine: the quick part of the suite.
quick_tests := $(wildcard tests/unit tests/properties tests/conformance tests/golden tests/parity tests/repo)

help:
	@echo "make demo    play the main job on a real model (KEEP=1 leaves the server up)"
	@echo "make test    the whole test suite, real engine included (up to 40 minutes)"
	@echo "make check   format, lint, types, imports and the quick tests (under 3 minutes)"
	@echo "make nightly 1,000 kills of real writes and 5,000 examples a property (up to an hour)"
	@echo "make bench   every benchmark, and a table of their figures (also in the README)"
	@echo "make setup   only make the environment"
	@echo "make clean   remove caches and build products (.venv stays)"

setup:
	@scripts/setup.sh

demo: setup
	@$(bin)/python demo/run.py $(if $(KEEP),--keep)

test: setup
	@$(bin)/python -m pytest tests

check: setup
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python -m pytest -m "not engine" $(quick_tests)

# A test has as long as it takes here: see EMBERKV_KILLS in CONTRIBUTING.md.
nightly: setup
	EMBERKV_KILLS=1000 HYPOTHESIS_PROFILE=nightly $(bin)/python -m pytest --timeout 3600 \
		tests/properties tests/faults/test_kills.py tests/faults/test_bit_flips.py \
		tests/faults/test_keeper_fuzz.py tests/unit/test_slab_format.py

bench: setup
	@$(bin)/python benchmarks/run.py
	@$(bin)/python scripts/readme_performance.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
