# Two doors: `make rollout` does the main job, `make test` runs the tests. Both install what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ROLLOUT_ARGS ?= --env math --tasks 16 --samples 4 --engines 2 --overwrite --out runs/math.zarr

.PHONY: rollout test test-fast lint system clean

rollout: $(STAMP)
	$(BIN)/heddle rollout $(ROLLOUT_ARGS)

test: lint
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -q
	PYTHONHASHSEED=1 $(BIN)/python -m pytest -q -m "not slow and not cluster and not vllm"

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not vllm"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/install.sh
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
