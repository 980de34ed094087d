# Every command runs in .venv, which make builds on first use and rebuilds when the versions change.

PYTHON ?= python3
ARGS ?=
# the oldest torch, the last without compiled kernels, the first with them, the pinned one, the newest
TORCH ?= 2.6.0 2.9.1 2.10.0 2.13.0 newest

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
CSRC := $(wildcard csrc/*.h csrc/*/*.h csrc/*/*.cpp)
KATEX := docs/katex/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help .venv demo reproduce test test-all matrix bench lint format check docs figures dist dist-test clean

help: ## list these commands
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

.venv: $(INSTALLED) ## build the virtual environment (the other commands do this when needed)

# torch goes in first and the build is not isolated, so that compiled parts are built against it. pip, which
# keeps one core busy, fetches the other packages beside the compiler.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(CSRC)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools wheel torch
	KHOT_PURE=1 $(PIP) install --no-build-isolation -c constraints.txt -e '.[dev,docs]' & pip=$$!; \
	$(BIN)/python setup.py --quiet build_ext --inplace; wait $$pip
	touch $@

demo: $(INSTALLED) ## learn which pixels distinguish digits, and draw them
	$(BIN)/python examples/demo.py $(ARGS)

reproduce: $(INSTALLED) ## run the papers' experiments (ARGS="list" names them)
	$(BIN)/python -m reproduce $(ARGS)

test: $(INSTALLED) ## run the tests and doctests (ARGS="-k name" for some of them)
	$(BIN)/pytest $(ARGS)

test-all: $(INSTALLED) ## run the slow tests too
	$(BIN)/pytest -m "" $(ARGS)

matrix: $(INSTALLED) ## build with other versions of torch and run the operators' table (TORCH="2.6.0 newest" for some of them)
	set -e; for version in $(TORCH); do .ci/try-torch $(PYTHON) $$version $(ARGS); done

bench: $(INSTALLED) ## time the operators beside torch.softmax
	$(BIN)/python -m benchmarks.cpu $(ARGS)

lint: $(INSTALLED) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC)
	$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; $(BIN)/mypy; found=$$?; wait $$types && exit $$found

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

check: lint test docs ## run all that should pass before a push: lint, tests, types, documentation, distributions
	$(BIN)/pytest -m "" tests/test_packaging.py tests/docs

docs: $(INSTALLED) $(KATEX) ## build the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

figures: $(INSTALLED) ## draw the figures of the documentation again
	$(BIN)/python docs/figures.py

# KaTeX, which typesets the formulas, is served with the pages
$(KATEX): docs/katex/package-lock.json
	npm ci --prefix docs/katex --silent
	touch $@

dist: $(INSTALLED) ## build the source distribution, the compiled wheel and the pure Python wheel
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	KHOT_PURE=1 $(PIP) wheel --no-build-isolation --no-deps -w dist dist/khot-*.tar.gz

dist-test: dist ## install each wheel in a new environment, and run the tests outside the source tree
	KHOT_REQUIRE_COMPILED=1 .ci/try-wheel $(BIN)/python dist/khot-*.tar.gz dist/khot-*-abi3-*.whl $(ARGS)
	.ci/try-wheel $(BIN)/python dist/khot-*.tar.gz dist/khot-*-none-any.whl $(ARGS)

clean: ## remove build output and caches (.venv stays)
	rm -rf build dist site docs/katex/node_modules src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f src/khot/*.so khot-demo.png $(INSTALLED)
	find src tests reproduce -name __pycache__ -type d -prune -exec rm -rf {} +
