# Two commands for a fresh clone: `make demo` serves the demo checkpoint and prints one streamed answer,
# `make test` runs every check. Both create .venv on first use and can be repeated at will.

.DEFAULT_GOAL := help
.PHONY: help setup demo test clean

help:
	@echo 'make demo    set up, start the server with the demo checkpoint, print one streamed answer, stop it'
	@echo 'make test    set up, run ruff, mypy and the tests that need no GPU'
	@echo 'make setup   create or refresh .venv only (PYTHON=..., TORCH_PIP_ARGS=... are honoured)'
	@echo 'make clean   remove .venv and the tools'"'"' caches'

setup:
	@.ci/setup

demo: setup
	@.venv/bin/python deployments/demo/run_demo.py

# PYTEST_ARGS replaces the default selection: make test PYTEST_ARGS="tests/rules -x"
test: setup
	@.ci/checks $(PYTEST_ARGS)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build *.egg-info
