# `make demo` trains a small GPT on a plan; `make test` runs the tests. Both make .venv themselves.
PYTHON := .venv/bin/python
RELEASE ?= 0.18.2
PYTEST_ARGS ?=

.PHONY: demo test test-slow test-packaging test-megatron lint types format clean

.venv/memx-ready: setup.py
	@.ci/venv

demo: .venv/memx-ready
	@examples/demo.sh

test: .venv/memx-ready
	$(PYTHON) -m pytest $(PYTEST_ARGS)

test-slow: .venv/memx-ready
	$(PYTHON) -m pytest -m slow $(PYTEST_ARGS)

# Installs the wheel and the checkout into fresh environments; needs a package index.
test-packaging: .venv/memx-ready
	$(PYTHON) -m pytest -m slow tests/contract/test_packaging.py $(PYTEST_ARGS)

# The tests that touch Megatron, on another release: its wheel alone, over the same environment.
test-megatron: .venv/memx-ready
	@test -d .megatron/$(RELEASE) || $(PYTHON) -m pip install --quiet --no-deps \
		--disable-pip-version-check --target .megatron/$(RELEASE) megatron-core==$(RELEASE)
	PYTHONPATH=$(CURDIR)/.megatron/$(RELEASE) $(PYTHON) -m pytest -m "megatron and not slow" $(PYTEST_ARGS)

lint: .venv/memx-ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: .venv/memx-ready
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# patches/ and launch/ belong to the package: mypy sees it put together.
types: .venv/memx-ready
	@rm -rf build/types && mkdir -p build/types/megatron_memx
	@ln -s $(CURDIR)/megatron_memx/* $(CURDIR)/patches $(CURDIR)/launch build/types/megatron_memx/
	cd build/types && $(CURDIR)/$(PYTHON) -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p megatron_memx

clean:
	rm -rf .venv .megatron .demo build dist *.egg-info
