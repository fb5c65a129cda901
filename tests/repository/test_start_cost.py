"""What each kind of process imports before it has work: nobody waits for a module that is not used yet."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """A kind of process.

    Attributes
    ----------
    start
        What it does until it waits for work.
    most
        Limit of its modules. A tenth above what they were when this was written (Python 3.11, Dask 2026.8).
    never
        Modules, and packages with all of theirs, that it must not have loaded.
    """

    start: str
    most: int
    never: tuple[str, ...]


HELP = """
import sys
sys.argv = ["heddle", "--help"]
from heddle_dask.cli.main import main
try:
    main()
except SystemExit:
    pass
"""
SCHEDULER = """
import asyncio
import distributed.cli.dask_scheduler
from distributed import Scheduler
from heddle_dask.preload.scheduler import dask_setup

async def run():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        await dask_setup(scheduler)

asyncio.run(run())
"""
ROLLOUT_WORKER = "import distributed.cli.dask_worker, heddle_dask.preload.rollout_worker"
TOOL_WORKER = "import distributed.cli.dask_worker, heddle_dask.preload.tool_worker"

# Of predictions and of stores. XGBoost brings SciPy.
LEARNING_AND_STORES = ("xgboost", "scipy", "pandas", "zarr", "numcodecs")
MODELS = ("torch", "vllm", "transformers", "tokenizers")
KINDS = {
    "heddle --help": Kind(
        HELP,
        270,
        (
            *LEARNING_AND_STORES,
            *MODELS,
            "numpy",
            "dask",
            "distributed",
            "aiohttp",
            "uvloop",
            "benchmarks",
            "heddle_dask.live.scheduler",
            "heddle_dask.live.worker",
            "heddle_dask.live.wire",
            "heddle_dask.sim",
            "heddle_dask.training",
        ),
    ),
    "driver": Kind("from heddle_dask import Rollout", 1080, (*LEARNING_AND_STORES, *MODELS, "aiohttp", "pydantic")),
    "scheduler": Kind(SCHEDULER, 990, (*LEARNING_AND_STORES, *MODELS, "aiohttp", "bokeh", "heddle_dask.records.store")),
    "rollout worker": Kind(
        ROLLOUT_WORKER,
        925,
        (*LEARNING_AND_STORES, *MODELS, "heddle_dask.predictors", "heddle_dask.live.scheduler"),
    ),
    "tool worker": Kind(
        TOOL_WORKER,
        815,
        (
            *LEARNING_AND_STORES,
            *MODELS,
            "aiohttp",
            "heddle_dask.predictors",
            "heddle_dask.strategies",
            "heddle_dask.live.scheduler",
        ),
    ),
}


def modules_of(start: str) -> set[str]:
    """The modules of a new process that has started so."""
    code = f"{start}\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", KINDS)
def test_a_process_imports_nothing_heavy_before_it_is_used(name: str) -> None:
    kind = KINDS[name]
    loaded = modules_of(kind.start)
    heavy = [each for each in sorted(loaded) if each.startswith(tuple(f"{never}." for never in kind.never))]
    assert [*(loaded & {*kind.never}), *heavy] == []
    assert len(loaded) <= kind.most
