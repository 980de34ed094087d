# Every command runs in .venv, into which make installs what the command needs, again when the versions change.

PYTHON ?= python3
ARGS ?=
# the oldest torch, the last without compiled kernels, the first with them, the pinned one, the newest
TORCH ?= 2.6.0 2.9.1 2.10.0 2.13.0 newest

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
HAS := $(VENV)/.has-
CSRC := $(wildcard csrc/*.h csrc/*/*.h csrc/*/*.cpp)
# khot for JAX has an environment of its own, without torch
JAX := .venv-jax
JAXSRC := $(wildcard khot-jax/csrc/*)
# What `make test` runs, with the extra `test` alone: six minutes of one core. The rest, of which the operators' table is
# the largest part, is for `make test-all`.
QUICK := README.md docs src/khot tests/test_house.py $(addprefix tests/test_,$(addsuffix .py,topk counting masks selection \
	budgets quantile losses cdfs signatures)) tests/sampling/test_designs.py tests/nn/test_soft_topk.py
KATEX := docs/katex/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help .venv demo reproduce test test-all test-slow test-jax matrix bench lint format check docs figures dist dist-test clean

help: ## list these commands
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

.venv: $(HAS)dev ## build the virtual environment with all that any command needs

# torch goes in first and the build is not isolated, so that compiled parts are built against it. torch compiles on all
# cores if it finds ninja.
$(HAS)torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt ninja setuptools wheel torch
	touch $@

# An extra of pyproject.toml; dev holds all of them. pip, which keeps one core busy, fetches the packages beside the
# compiler.
$(HAS)%: $(HAS)torch pyproject.toml setup.py $(CSRC)
	KHOT_PURE=1 $(PIP) install --no-build-isolation -c constraints.txt -e '.[$*]' & pip=$$!; \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py --quiet build_ext --inplace; wait $$pip
	touch $(addprefix $(HAS),$(if $(filter dev,$*),dev docs lint release reproduce test,$*))

demo: $(HAS)reproduce ## learn which pixels distinguish digits, and draw them
	$(BIN)/python examples/demo.py $(ARGS)

reproduce: $(HAS)reproduce ## run the papers' experiments (ARGS="list" names them)
	$(BIN)/python -m reproduce $(ARGS)

test: $(HAS)test ## run the tests of the operators and the examples in docstrings and pages, on all cores
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal --doctest-ignore-import-errors $(QUICK) $(ARGS)

test-all: $(HAS)dev ## run all tests but the slow ones (ARGS="-k name" for some of them, "-n auto" on all cores)
	$(BIN)/pytest $(ARGS)

test-slow: $(HAS)dev ## run the slow tests, too
	$(BIN)/pytest -m "" $(ARGS)

$(JAX)/.installed: $(CSRC) $(JAXSRC) $(wildcard khot-jax/khot_jax/*.py) khot-jax/pyproject.toml khot-jax/setup.py
	$(PYTHON) -m venv $(JAX)
	KHOT_JAX_OBJECTS="$(abspath $(firstword $(wildcard build/temp*/csrc/simd)))" \
	$(JAX)/bin/python -m pip --disable-pip-version-check install './khot-jax[test]'
	touch $@

test-jax: $(JAX)/.installed ## build khot for JAX, and run its tests
	cd khot-jax && ../$(JAX)/bin/pytest -n auto $(ARGS)

matrix: ## build with other versions of torch and run the operators' table (TORCH="2.6.0 newest" for some of them)
	set -e; for version in $(TORCH); do .ci/try-torch $(PYTHON) $$version $(ARGS); done

bench: $(HAS)reproduce ## time the operators beside torch.softmax
	$(BIN)/python -m benchmarks.cpu $(ARGS)

lint: $(HAS)lint ## check style, format, types and the subjects of the last commits
	! git log -n 20 --no-merges --format=%s 2>/dev/null | grep -v '^Merge ' | LC_ALL=C.UTF-8 grep -E '^.{73}|\.$$'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(JAXSRC)
	$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; $(BIN)/mypy; found=$$?; wait $$types && exit $$found

format: $(HAS)lint ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(JAXSRC)

check: lint test-all docs ## run all that should pass before a push: lint, tests, types, documentation, distributions
	$(BIN)/pytest -m "" tests/test_packaging.py tests/docs

docs: $(HAS)docs $(KATEX) ## build the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

figures: $(HAS)reproduce ## draw the figures of the documentation again
	$(BIN)/python docs/figures.py

# KaTeX, which typesets the formulas, is served with the pages
$(KATEX): docs/katex/package-lock.json
	npm ci --prefix docs/katex --silent
	touch $@

dist: $(HAS)release ## build the source distributions and wheels, of khot also the pure Python one
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	KHOT_PURE=1 $(PIP) wheel --no-build-isolation --no-deps -w dist dist/khot-*.tar.gz
	$(BIN)/python -m build --outdir dist khot-jax

dist-test: $(HAS)dev dist ## install each wheel in a new environment, and run the tests outside the source tree
	KHOT_REQUIRE_COMPILED=1 .ci/try-wheel $(BIN)/python dist/khot-*.tar.gz dist/khot-*-abi3-*.whl $(ARGS)
	.ci/try-wheel $(BIN)/python dist/khot-*.tar.gz dist/khot-*-none-any.whl $(ARGS)
	.ci/try-jax-wheel $(PYTHON) dist/khot_jax-*.tar.gz dist/khot_jax-*.whl $(ARGS)

clean: ## remove build output and caches (.venv stays)
	rm -rf build dist khot-jax/build site docs/katex/node_modules src/*.egg-info khot-jax/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f src/khot/*.so khot-demo.png $(HAS)* $(JAX)/.installed
	find src tests reproduce -name __pycache__ -type d -prune -exec rm -rf {} +
