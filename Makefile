# Two doors: `make rollout` does the main job, `make test` runs the tests. Both install what they need, once. Before a
# release `make test-long` runs the tests that take minutes each.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CRDS := build/crds/.there
AGENTS := build/agents/.there
PEERS := build/peers/.there
VERL := build/verl/.there
ROLLOUT_ARGS ?= --env math --tasks 16 --samples 4 --engines 2 --max-step-tokens 512 --overwrite --out runs/math.zarr

# Pure tests start neither a Dask cluster nor vLLM; they run beside each other, a file in one process, long files first.
PURE := not cluster and not vllm and not slurm and not long and not gpu
LIVE := (cluster or vllm) and not slurm and not long and not gpu
# A process that a test has ended fails the stage: a new one would meet the same test.
FILES := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PARALLEL := -n logical --maxprocesses 8 $(FILES)
# A test with a cluster mostly waits for processes to start: two files at once, whatever the cores.
LIVE_AT_ONCE ?= 2
TWO := -n $(LIVE_AT_ONCE) $(FILES)
# To collect all files takes each process 15 s of CPU.
LIVE_FILES = $(shell grep -lrE 'mark\.(cluster|vllm)' --include='test_*.py' tests)
LONG_FILES = $(shell grep -lrE 'mark\.long' --include='test_*.py' tests)
DECIDES := $(addprefix tests/,core predictors sim strategies training)
# Says the seconds of the stage, and keeps those of its tests.
STAGE := $(BIN)/python scripts/test_times.py stage
PYTEST := $(BIN)/python -m pytest -q
TWICE := env PYTHON=$(BIN)/python sh scripts/pytest_twice.sh
ROUNDS ?= 3

.PHONY: rollout test test-fast test-long test-slurm gpu explore docs lint browser screenshots clean

rollout: $(STAMP)
	$(BIN)/heddle rollout $(ROLLOUT_ARGS)

# Stages that mostly wait, or that use one core, run beside another one. The second hash seed is for what decides or
# counts: files, processes and command lines do not depend on it. Tests with `hash_seed` in their name set hash seeds
# themselves.
test: browser $(CRDS) $(PEERS) $(AGENTS)
	$(BIN)/python scripts/test_times.py begin
	$(STAGE) lint $(MAKE) lint + docs $(MAKE) docs
	HEDDLE_SITE=$(CURDIR)/build/docs PYTHONHASHSEED=0 $(STAGE) pure $(TWICE) pure $(PARALLEL) -m "$(PURE)" \
	  + slurm env PYTHON=$(BIN)/python sh scripts/test_slurm.sh --optional
	PYTHONHASHSEED=0 $(STAGE) live $(TWICE) live $(TWO) -m "$(LIVE)" $(LIVE_FILES)
	PYTHONHASHSEED=1 $(STAGE) second-hash-seed $(TWICE) second-hash-seed $(PARALLEL) -m "$(PURE) and not slow" \
	  -k "not hash_seed" $(DECIDES)
	$(BIN)/python scripts/test_times.py summary

# What takes minutes and protects a release, not a change; run it before one.
test-long: browser $(CRDS) $(PEERS) $(AGENTS) $(VERL)
	$(BIN)/python scripts/test_times.py begin
	PYTHONHASHSEED=0 $(STAGE) long $(TWICE) long $(TWO) -m "long and not slurm" $(LONG_FILES)
	$(BIN)/python scripts/test_times.py summary

# On SLURM daemons of their own, with virtual nodes on this machine; needs Debian and root.
test-slurm: $(STAMP)
	PYTHON=$(BIN)/python sh scripts/test_slurm.sh

# On a machine with a GPU, in an environment with the extras gpu, train, bench and dev: make gpu BIN=ENVIRONMENT/bin.
# Rows: gpu-rows.jsonl.
gpu:
	$(BIN)/python -m benchmarks gpu $(GPU_ARGS)

test-fast: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "$(PURE) and not slow"
	$(PYTEST) -m "cluster and not slow and not vllm and not slurm and not long" $(LIVE_FILES)

# New examples for the property tests, ROUNDS times; `make test` draws the same ones every time.
explore: $(STAMP)
	for round in $$(seq $(ROUNDS)); do \
	  HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -q $(PARALLEL) -m "hypothesis and $(PURE)" || exit 1; \
	done

# The documentation site in build/docs, without warnings; the notebook runs on a cluster of its own.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -E -c docs -b html . build/docs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of the dashboard look at it in Debian's Chromium.
browser:
	sh scripts/install_browser.sh

# The schemas for docs/kubernetes.md. The wheel is read, not installed: it would slow every `dask` command down.
$(CRDS): tests/repository/kubernetes-wheel.txt $(STAMP)
	$(BIN)/python -m pip download -q --no-deps --require-hashes -d $(@D) -r tests/repository/kubernetes-wheel.txt
	touch $@

# Wheels of other projects, whose own tasks and environments are used unchanged in tests; some want a later Python.
$(PEERS): tests/repository/peer-wheels.txt $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip download -q --no-deps --require-hashes --only-binary :all: --python-version 3.13 \
	  -d $(@D)/wheels -r tests/repository/peer-wheels.txt
	for wheel in $(@D)/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(@D)/site || exit 1; done
	touch $@

# A trainer of another project, for a long test: Linux wheels for the Python of the environment.
$(VERL): tests/repository/verl-packages.txt $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --require-hashes --only-binary :all: --target $(@D)/site \
	  -r tests/repository/verl-packages.txt
	touch $@

# Agents of other projects, which the tests run as they are.
$(AGENTS): tests/agents/python-packages.txt tests/agents/package-lock.json scripts/install_agents.sh $(STAMP)
	PYTHON=$(BIN)/python sh scripts/install_agents.sh $(@D)

# The images of docs/dashboard.md, from a simulated rollout.
screenshots: $(STAMP) browser
	$(BIN)/python -m scripts.dashboard_images docs/images

$(STAMP): pyproject.toml constraints.txt requirements-lock.txt scripts/install.sh scripts/torch-cpu.sha256
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/install.sh
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
