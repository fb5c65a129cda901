"""What exports say of the tokens of a step, as plain numbers; and what they say of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.records.trajectory_prefix import PREFIX


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """Facts of a run that each of its trajectories is exported with.

    Attributes
    ----------
    name
        Of the run.
    model
        Name of the model, as the last parts of its directory.
    version
        Of heddle_dask, with which the run was made.
    """

    name: str
    model: str
    version: str

    @classmethod
    def of(cls, name: str, metadata: dict[str, Any]) -> ExportedRun:
        model = "/".join(str(metadata.get("model", "unknown")).rstrip("/").split("/")[-2:])
        return cls(name, model, str(metadata.get("heddle_dask", "unknown")))


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one step.

    Attributes
    ----------
    logprobs
        0 where the engine told none; such a token is not in the mask.
    mask
        Of the sampled tokens, which can be trained on.
    """

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    mask: list[bool]
    versions: list[int]

    @classmethod
    def of(cls, record: TrajectoryRecord, step: StepRecord) -> StepTokens:
        branch = record.branches[step.branch]
        span = slice(step.token_start, step.token_stop)
        logprobs = branch.logprobs[span]
        known = np.isfinite(logprobs)
        return cls(
            branch.token_ids[: step.token_start].tolist(),
            branch.token_ids[span].tolist(),
            # Rounding of an engine may leave a certain token a little above 0.
            np.where(known, np.minimum(logprobs, 0.0), 0.0).tolist(),
            known.tolist(),
            sorted(set(branch.policy_version[span].tolist())),
        )


def finite(value: float) -> float | None:
    """A number that JSON can hold; None for one that is not known."""
    return round(value, 6) if math.isfinite(value) else None


def record_facts(record: TrajectoryRecord) -> dict[str, Any]:
    """What a receiver may want to know of an attempt; the reward is None where it is unknown."""
    return {
        "trajectory_id": record.trajectory_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "environment": record.environment,
        "sample_index": record.sample_index,
        "status": record.status,
        "cause": record.cause,
        "reward": record.reward,
        "reward_cause": record.reward_cause,
        "reward_parts": dict(record.reward_parts),
        "seconds": finite(record.finished_s - record.started_s),
        **({PREFIX: record.metadata[PREFIX]} if PREFIX in record.metadata else {}),
    }
