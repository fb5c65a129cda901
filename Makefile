# Two doors: `make rollout` does the main job, `make test` runs the tests. Both install what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CRDS := build/crds/.there
ROLLOUT_ARGS ?= --env math --tasks 16 --samples 4 --engines 2 --max-step-tokens 512 --overwrite --out runs/math.zarr

# Pure tests start neither a Dask cluster nor vLLM; they run beside each other, a file in one process.
PURE := not cluster and not vllm and not slurm
LIVE := (cluster or vllm) and not slurm
PARALLEL := -n logical --maxprocesses 8 --dist loadfile
# A test with a cluster mostly waits for processes to start: two files at once, whatever the cores.
TWO := -n 2 --dist loadfile
# What fails beside another file runs once more, alone: on a busy machine processes can be slower than any patience. A
# test that fails twice has failed, and the first failure stays in the log.
# Only after a whole run (exit code 1): what a crash left unrun must not pass.
AGAIN := --last-failed --last-failed-no-failures none
DECIDES := $(addprefix tests/,chat core cost environments live predictors sim strategies training views weights workloads)
ROUNDS ?= 3

.PHONY: rollout test test-fast test-slurm explore docs lint browser screenshots clean

rollout: $(STAMP)
	$(BIN)/heddle rollout $(ROLLOUT_ARGS)

# The second hash seed is for what decides or counts: files, processes and command lines do not depend on it. Tests with
# `hash_seed` in their name set hash seeds themselves.
test: lint browser $(CRDS)
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -q $(PARALLEL) -m "$(PURE)"
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -q $(TWO) -m "$(LIVE)" || \
	  { [ $$? -eq 1 ] && PYTHONHASHSEED=0 $(BIN)/python -m pytest -q $(AGAIN) -m "$(LIVE)"; }
	$(MAKE) docs
	PYTHONHASHSEED=1 $(BIN)/python -m pytest -q $(PARALLEL) -m "$(PURE) and not slow" -k "not hash_seed" $(DECIDES)
	PYTHON=$(BIN)/python sh scripts/test_slurm.sh --optional

# On SLURM daemons of their own, with virtual nodes on this machine; needs Debian and root.
test-slurm: $(STAMP)
	PYTHON=$(BIN)/python sh scripts/test_slurm.sh

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "$(PURE) and not slow"
	$(BIN)/python -m pytest -q -m "cluster and not slow and not vllm and not slurm"

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

# The images of docs/dashboard.md, from a simulated rollout.
screenshots: $(STAMP) browser
	$(BIN)/python -m scripts.dashboard_images docs/images

$(STAMP): pyproject.toml constraints.txt requirements-lock.txt scripts/install.sh scripts/torch-cpu.sha256
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/install.sh
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
