TORCH ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 3
SCREENSHOTS_ARGS ?=
export TORCH

.PHONY: help setup dashboard test screenshots lint gpu-check clean

help:
	@echo "make setup      .venv with all that membound needs; the command is .venv/bin/membound"
	@echo "make dashboard  setup, then the dashboard on 127.0.0.1:8501"
	@echo "make test       setup, what the tests need, and the tests (PYTEST_ARGS='-k roofline' for some, TEST_WORKERS=3)"
	@echo "make screenshots  pictures of every page with the runs kept here, in build/screenshots (SCREENSHOTS_ARGS=--whole)"
	@echo "make lint       ruff and mypy"
	@echo "make gpu-check  on a GPU: the kernels checked, their resources, and their times, whose table comes last"
	@echo "make clean      removes .venv, build outputs and caches"
	@echo "TORCH=auto|cpu|cuda|none picks the build of torch"

setup:
	@.ci/bootstrap.sh setup

# Kernels are compiled on first use anyway; whoever opens the page for the first time should not wait for that.
.venv/.kernels: $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h) | setup
	@echo "compiling the kernels for this processor, once"
	@.venv/bin/python -c "from membound.kernels.cpu.build import load_library; load_library()" 2>/dev/null || \
	  echo "they cannot be compiled here: membound doctor says why"
	@touch $@

dashboard: setup .venv/.kernels
	@.venv/bin/membound dashboard

test:
	@.ci/bootstrap.sh test
	.venv/bin/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

screenshots:
	@.ci/bootstrap.sh test
	.venv/bin/python tests/browser/screenshots.py $(SCREENSHOTS_ARGS)

lint:
	@.ci/bootstrap.sh test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@mkdir -p build/typing && ln -sfn ../.. build/typing/membound
	.venv/bin/mypy

gpu-check: setup
	@failed=0; for what in check resources bench; do .venv/bin/membound kernels $$what || failed=1; done; exit $$failed

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
