.PHONY: setup run test test-full check bench clean
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

setup: .venv/.ready

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.26" ninja
	touch $@

.venv/.ready: .venv/.installed CMakeLists.txt $(wildcard native/*)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

run: setup
	$(BIN)/octavo pull smollm2
	$(BIN)/octavo run smollm2 "What is the capital of France?"

test: setup
	$(BIN)/octavo pull smollm2
	$(BIN)/python -m pytest

test-full: setup
	$(BIN)/octavo pull smollm2
	OCTAVO_TEST_SIZE=full $(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build
