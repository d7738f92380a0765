# Everything a clone needs: `make demo` and `make test` set themselves up with python3 >= 3.10, make and g++.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=
# require: a native core that can't be built or loaded is an error. auto and off: go on with the slower pure twin.
export WEIGHTSYNC_NATIVE ?= require

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LINT_STAMP := $(VENV)/.installed-lint
NIXL_STAMP := $(VENV)/.installed-nixl
NATIVE := $(shell find csrc -type f \( -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \) 2>/dev/null)

# What the caller's shell is set up for must not leak in: other projects' paths, and pip settings that fight our pins.
unexport PYTHONPATH PYTHONHOME PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_TARGET PIP_PREFIX PIP_USER PIP_NO_BUILD_ISOLATION

.PHONY: help demo test bench lint sanitize wheel clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@echo 'weightsync: make TARGET [ARGS="..."]'
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

demo: $(STAMP)  ## Train, serve and switch weights live on this machine; ARGS="--seconds 20 --json out.json"
	@$(BIN)/weightsync demo $(ARGS)

test: $(STAMP) $(NIXL_STAMP)  ## Run the tests; ARGS="-k shm"
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP) $(NIXL_STAMP)  ## Run the benchmarks (data is checked in each run); results go to build/bench.json
	@mkdir -p build
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-json=build/bench.json $(ARGS)

lint: $(STAMP) $(LINT_STAMP)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict weightsync

sanitize:  ## Run the native core's tests under ASan and UBSan
	$(MAKE) -C csrc sanitize

wheel: $(STAMP)  ## Build a wheel with the native core into dist/
	WEIGHTSYNC_NATIVE=require $(BIN)/python -m pip wheel $(PIP_ARGS) -c constraints.txt --no-deps --wheel-dir dist .

clean:  ## Remove what was built, and the virtual environment
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find weightsync -name '*.so' -delete
	find weightsync tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@if [ -f csrc/Makefile ]; then $(MAKE) -C csrc clean; fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'weightsync needs Python 3.10 or newer; name it with PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'python3 has no venv module; on Debian and Ubuntu: apt-get install python3-venv' >&2; rm -rf $(VENV); exit 1; }

# torch first and pinned: on its own, the newest torch may bring gigabytes that nothing here needs.
$(STAMP): pyproject.toml setup.py constraints.txt $(NATIVE) | $(BIN)/python
	@[ $(WEIGHTSYNC_NATIVE) != require ] || command -v g++ >/dev/null || { echo 'the native core needs g++; on Debian and Ubuntu: apt-get install g++' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[plot,test]'
	@touch $@

# Without what it depends on, which is torch (there already) and a second build for another CUDA.
$(NIXL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt --no-deps nixl nixl-cu12
	@touch $@

$(LINT_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt ruff mypy
	@touch $@
