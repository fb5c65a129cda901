"""What the page of peers says of this project: a cell with a full mark names code that exists, an empty one none."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
WORDS = {"cluster engine": "Dask", "engines": "vLLM", "policy version": "per token", "sandboxes of tools": "bubblewrap"}
"""Rows whose cell is a word and no mark."""

FACTS = {
    "cluster engine": ["heddle_dask.live.scheduler.plugin:HeddleScheduler"],
    "trains": ["pipelines.grpo.learner", "pipelines.any_trainer.following_engines"],
    "engines": ["heddle_dask.engines.vllm_command:VllmOptions"],
    "run on GPUs in practice": ["benchmarks.gpu"],
    "unmodified agents through an endpoint": ["heddle_dask.gateway.server", "heddle_dask.environments.command_agent"],
    "token ids as sampled": ["heddle_dask.records.token_record:TokenRecord.append"],
    "loss mask, logprobs": ["heddle_dask.records.token_record:TokenRecord.loss_mask"],
    "policy version": ["heddle_dask.core.ids:PolicyVersion"],
    "weight updates in the middle of rollouts": ["heddle_dask.live.training.weight_control:WeightControl"],
    "a bound on staleness": ["heddle_dask.core.run_description:StalenessBound"],
    "over-sampling, redundancy of groups": ["heddle_dask.training.groups:GroupPlan"],
    "branches: forks, several replies": ["heddle_dask.environments.base:Context.fork"],
    "multi-agent episodes": ["heddle_dask.environments.multi_agent", "heddle_dask.environments.base:Context.agent"],
    "router that keeps a trajectory on its engine": ["heddle_dask.strategies.placement.sticky"],
    "admission by KV memory": ["heddle_dask.strategies.admission.kv_forecast"],
    "order by predicted length, preemption": [
        "heddle_dask.strategies.scheduling:LongestFirst",
        "heddle_dask.core.commands:PREEMPTED_FOR",
    ],
    "moves of KV caches between engines": ["heddle_dask.core.commands:MoveContext"],
    "CPUs of tools scheduled with the steps": ["heddle_dask.core.commands:RunAction"],
    "resume of unfinished rollouts": ["heddle_dask.live.driver.files.resume"],
    "typed causes of failures": ["heddle_dask.records.trajectory:Cause"],
    "walltime of SLURM jobs, a pool of many jobs": ["heddle_dask:SlurmCluster"],
    "sandboxes of tools": ["heddle_dask.sandbox.bubblewrap", "heddle_dask.sandbox_service"],
    "simulator with the live strategies": ["heddle_dask.sim.world:SimulatedWorld"],
    "columnar store of tokens": ["heddle_dask.records.store", "heddle_dask.records.exporters"],
    "spans for OpenTelemetry": ["heddle_dask.views.trace.spans"],
}
"""By row: what exists where the cell says that it is there, and what does not where it says that it is not."""


def cells() -> dict[str, str]:
    """Our column of the table, by row."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|(?:[^|]+\|){7}$", PAGE, re.MULTILINE)
    return {row: cell for row, cell in rows if row.strip(" -")}


def exists(name: str) -> bool:
    """Whether a module, or ``module:attribute.attribute``, exists."""
    module, _, path = name.partition(":")
    try:
        if importlib.util.find_spec(module) is None:
            return False
    except ModuleNotFoundError:
        return False
    if not path:  # a module that needs torch is not loaded for that
        return True
    found = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_every_row_is_tied_to_a_feature() -> None:
    assert list(cells()) == list(FACTS)


@pytest.mark.parametrize("row", FACTS)
def test_the_cell_says_what_the_code_has(row: str) -> None:
    cell = cells()[row]
    if row in WORDS:
        assert cell.startswith(WORDS[row])
    assert (cell[0] in "●◐○") != (row in WORDS)
    wrong = [name for name in FACTS[row] if exists(name) != (cell[0] != "○")]
    assert wrong == [], cell
