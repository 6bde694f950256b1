# `make demo` and `make test` install what they need into .venv and run; see README.md.
# PYTHON=... picks the interpreter, ARGS=... is handed on to the command.
PYTHON ?= python3
VENV ?= .venv
ASCEND_VENV ?= .venv-ascend
export PYTHON VENV

.PHONY: demo test lint bench demo-ascend test-ascend

demo: $(VENV)/.installed-demo
	$(VENV)/bin/graphrt demo $(ARGS)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy graphrt packages/graphrt-ascend-sim/src

bench: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.host_overhead $(ARGS)

# On the simulator of packages/graphrt-ascend-sim, with torch_npu itself. With its autoload torch
# would load torch_npu too early.
SIMULATED = OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 GRAPHRT_PLATFORM=ascend-sim

demo-ascend: $(ASCEND_VENV)/.installed-ascend-sim
	$(SIMULATED) $(ASCEND_VENV)/bin/graphrt demo $(ARGS)

test-ascend: $(ASCEND_VENV)/.installed-ascend-sim
	$(SIMULATED) $(ASCEND_VENV)/bin/python -m pytest -m npu $(ARGS)

$(ASCEND_VENV)/.installed-ascend-sim: pyproject.toml constraints.txt ci/setup.sh \
		packages/graphrt-ascend-sim/pyproject.toml
	VENV=$(ASCEND_VENV) GRAPHRT_TORCH=2.13.0 bash ci/setup.sh ascend-sim
	touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt ci/setup.sh
	bash ci/setup.sh $*
	touch $@
