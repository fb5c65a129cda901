"""Trajectories as OpenEnv's ``TrainingTrace``, schema 1 (checked with openenv 0.10.0), which TRL 1.16 trains on.

Each LLM step is a turn of its own with its whole context, so that branches need nothing else: what two of them have in
common was sampled in one turn, and is trained there.
"""

from __future__ import annotations

from typing import Any

from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.exports.token_facts import ExportedRun, StepTokens, record_facts

SCHEMA_VERSION = 1


def openenv_trace(record: TrajectoryRecord, run: ExportedRun) -> dict[str, Any] | None:
    """One trajectory as a JSON-able trace; None where it has no turn."""
    turns = [_turn(record, run, step) for step in record.steps if step.token_start]
    return {"schema_version": SCHEMA_VERSION, "turns": turns} if turns else None


def _turn(record: TrajectoryRecord, run: ExportedRun, step: StepRecord) -> dict[str, Any]:
    tokens = StepTokens.of(record, step)
    return {
        "node_id": f"{record.trajectory_id}#{step.branch}/{step.step_index}",
        "prompt_token_ids": tokens.prompt_ids,
        "completion_token_ids": tokens.sampled_ids,
        "per_token_logps": tokens.logprobs,
        "loss_mask": [0] * len(tokens.prompt_ids) + [int(each) for each in tokens.mask],
        "request": {"model": run.model, "temperature": step.temperature}
        if step.temperature >= 0
        else {"model": run.model},
        "response": {"finish_reason": step.finish_reason},
        "metadata": {**record_facts(record), "branch": step.branch, "policy_versions": tokens.versions},
    }
