# `make demo` and `make test` install what they need into .venv and run; see README.md.
# PYTHON=... picks the interpreter, ARGS=... is handed on to the command.
PYTHON ?= python3
VENV ?= .venv
ASCEND_VENV ?= .venv-ascend
# The one that torch_npu is built for.
ASCEND_TORCH = 2.13.0
export PYTHON VENV

.PHONY: demo test test-core test-long test-sanitized lint bench docs demo-ascend test-ascend test-ascend-long
.PHONY: setup-demo setup-test setup-dev setup-docs setup-ascend-sim

demo: setup-demo
	$(VENV)/bin/graphrt demo $(ARGS)

# As many tests at a time as there are cores, each on one; where there is a GPU one after the other.
PARALLEL = $(if $(shell nvidia-smi -L 2>/dev/null),,-n auto --maxprocesses 8 --dist worksteal)

test: setup-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

# Core without graphrt.trust, which it may not need.
test-core: setup-test
	bash ci/core_alone.sh $(VENV)/bin/python $(PARALLEL) $(ARGS)

# What takes minutes: random programs, operator samples, long runs; see docs/development/testing.md.
test-long: setup-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "long and not cuda and not npu" $(PARALLEL) $(ARGS)
	GRAPHRT_TEST_MORE=10 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest \
	    -m "draws and not long and not cuda and not npu" $(PARALLEL) $(ARGS)

# The C part, built anew under GCC's sanitizers, against Python. Python itself leaks at its end.
SANITIZE = -fsanitize=address,undefined
test-sanitized: setup-test
	CFLAGS="$(SANITIZE) -fno-sanitize-recover=undefined -g -O1" LDFLAGS="$(SANITIZE)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	$(VENV)/bin/python -m pytest tests/core/test_native.py tests/core/test_native_replay.py $(ARGS)

lint: setup-dev
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy graphrt packages/graphrt-ascend-sim/src
	$(VENV)/bin/python -m pytest -m "long or not long" tests/typing

bench: setup-test
	$(VENV)/bin/python -m benchmarks.host_overhead $(ARGS)

docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --clean $(ARGS)

# On the simulator of packages/graphrt-ascend-sim, with torch_npu itself. With its autoload torch
# would load torch_npu too early.
SIMULATED = OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 GRAPHRT_PLATFORM=ascend-sim

demo-ascend: setup-ascend-sim
	$(SIMULATED) TORCH_CPP_LOG_LEVEL=ERROR PYTHONWARNINGS=ignore $(ASCEND_VENV)/bin/graphrt demo $(ARGS)

test-ascend: setup-ascend-sim
	$(SIMULATED) $(ASCEND_VENV)/bin/python -m pytest -m npu $(PARALLEL) $(ARGS)

test-ascend-long: setup-ascend-sim
	$(SIMULATED) $(ASCEND_VENV)/bin/python -m pytest -m "long and npu" $(PARALLEL) $(ARGS)

# Always run: only ci/setup.sh knows whether Python, torch or a list of needs has changed.
setup-demo setup-test setup-dev setup-docs:
	@bash ci/setup.sh $(@:setup-%=%)

setup-ascend-sim:
	@VENV=$(ASCEND_VENV) GRAPHRT_TORCH=$(ASCEND_TORCH) bash ci/setup.sh ascend-sim
