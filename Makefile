# `make demo` and `make test` install what they need into .venv and run; see README.md.
# PYTHON=... picks the interpreter, ARGS=... is handed on to the command.
PYTHON ?= python3
VENV ?= .venv
export PYTHON VENV

.PHONY: demo test lint bench

demo: $(VENV)/.installed-demo
	$(VENV)/bin/graphrt demo $(ARGS)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy graphrt

bench: $(VENV)/.installed-test
	$(VENV)/bin/python benchmarks/host_overhead.py $(ARGS)

$(VENV)/.installed-%: pyproject.toml constraints.txt ci/setup.sh
	bash ci/setup.sh $*
	touch $@
