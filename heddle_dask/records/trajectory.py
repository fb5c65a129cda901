"""The record of one trajectory: its token branches, its steps, its actions, and its end.

Frozen values, checked at construction, so that stored data is consistent: each step names a branch with its generated
tokens as sampled. Every end is data: a failed trajectory has a status and a cause, and its reward is None if none was
computed.

The second half is the form of a trajectory in the journal: JSON-able, compact and exact.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from heddle_dask.core.notebook import facts_html, named_repr, rows_html
from heddle_dask.core.value_types import check_types, read_from
from heddle_dask.records.token_record import Attribution, TokenRecord

Status = Literal["completed", "truncated", "aborted", "failed"]
Cause = Literal[
    "",
    "agent",
    "action",
    "engine",
    "context",
    "user",
    "driver",
    "time",
    "sandbox",
    "environment",
    "stale",
    "redundant",
    "no-progress",
    "prefix",
]

TRAJECTORY_FINISHED = "trajectory_finished"
"""Kind of the journal record whose body is `trajectory_to_body`; `recover` looks for it."""

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One LLM step with all its attempts. Times in seconds of the run.

    Attributes
    ----------
    branch
        Index into `TrajectoryRecord.branches`.
    token_start, token_stop
        The first `token_start` tokens of the branch were the context; those up to `token_stop` were generated.
    prompt_tokens, generated_tokens, cached_tokens
        As counted by the engine; cached: prompt tokens found in the prefix cache.
    queue_s
        Seconds of waiting for an engine and a slot, of the control plane, and of the engine's own queue if reported.
    prefill_s, decode_s
        nan if the engine does not report them.
    max_tokens, temperature, top_p, top_k, min_p
        As the step was asked for; 0 and nan in records of versions that did not keep them.
    """

    step_index: int
    branch: int
    token_start: int
    token_stop: int
    engine_id: str
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    migrations: int
    submitted_s: float
    finished_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    max_tokens: int = 0
    temperature: float = math.nan
    top_p: float = math.nan
    top_k: int = 0
    min_p: float = math.nan


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """One tool or reward call. Times in seconds of the run; nan when unknown.

    Attributes
    ----------
    after_step
        Index of the last step before it; -1 before the first.
    cpus
        CPUs granted to it.
    queue_s
        From its request until it ran.
    quota_s, load_s
        Parts of `queue_s`: it waited for the quota of an API, and until its model service was resident.
    branch
        Index into `TrajectoryRecord.branches`; `action_index` counts those of its branch.
    """

    action_index: int
    after_step: int
    kind: str
    label: str
    cpus: int
    status: str
    submitted_s: float
    finished_s: float
    queue_s: float
    run_s: float
    branch: int = 0
    quota_s: float = math.nan
    load_s: float = math.nan


def check_ending(status: str, cause: str) -> None:
    """Raise `ValueError` for what is no status or cause of a trajectory."""
    if status not in get_args(Status) or cause not in get_args(Cause):
        raise ValueError(f"a trajectory of status {status!r} with cause {cause!r}")


@dataclass(frozen=True, slots=True)
class TrajectoryOutline:
    """A trajectory without its tokens, for figures over a whole run; the fields are as of `TrajectoryRecord`."""

    trajectory_id: str
    group_id: str
    task_id: str
    environment: str
    sample_index: int
    seed: int
    status: Status
    cause: Cause
    detail: str
    reward: float | None
    steps: tuple[StepRecord, ...]
    actions: tuple[ActionRecord, ...]
    started_s: float
    finished_s: float

    def __repr__(self) -> str:
        return trajectory_line(self)

    def _repr_html_(self) -> str:
        """What a notebook shows; no text of the trajectory."""
        return trajectory_html(self)

    @property
    def generated_tokens(self) -> int:
        """Tokens that its steps sampled, branches included."""
        return sum(step.generated_tokens for step in self.steps)


@dataclass(frozen=True, slots=True, repr=False)
class TrajectoryRecord(TrajectoryOutline):
    """One attempt of an agent at one prompt.

    Attributes
    ----------
    trajectory_id
        Unique in its run.
    seed
        A signed 64-bit integer.
    cause, detail
        The boundary of the failure, empty without one; and the error message.
    reward
        None when unknown; a number that is not finite is unknown.
    branches
        The first is the main one; further ones if an agent rewrote its history.
    domain, message_tokens, max_steps, prompt_key
        Facts about the task for predictors: environment and kind, length of the task itself, limit of steps, identity
        of the prompt over runs; empty or 0 when unknown.
    reward_parts
        Named parts of the reward.
    metadata
        JSON-able facts that the agent program has set.
    reward_cause, reward_detail
        Why the reward is unknown: a cause of `ActionFailed`, ``"hook"`` (the environment's code raised) or ``"time"``,
        where it was to be computed after the program; ``"not-finite"`` where it, or a part of it, is nan or infinite.
        And the message. Empty where nothing failed.

    Raises
    ------
    ValueError
        If the parts contradict each other, which is a bug of this package.
    """

    branches: tuple[TokenRecord, ...]
    domain: str = ""
    message_tokens: int = 0
    max_steps: int = 0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward_cause: str = ""
    reward_detail: str = ""
    prompt_key: str = ""

    def __post_init__(self) -> None:
        check_ending(self.status, self.cause)
        if not -(2**63) <= self.seed < 2**63:
            self._refuse(f"seed {self.seed} does not fit 64 bits")
        if self.reward is not None:
            reward = float(self.reward)
            object.__setattr__(self, "reward", reward if math.isfinite(reward) else None)
        for step in self.steps:
            self._check_step(step)

    def _check_step(self, step: StepRecord) -> None:
        name = f"step {step.step_index}"
        if not 0 <= step.branch < len(self.branches):
            self._refuse(f"{name} is on branch {step.branch} of {len(self.branches)}")
        branch = self.branches[step.branch]
        start, stop = step.token_start, step.token_stop
        if not 0 <= start <= stop <= len(branch):
            self._refuse(f"{name} spans tokens {start} to {stop} of {len(branch)}")
        if stop - start != step.generated_tokens:
            self._refuse(f"{name} generated {step.generated_tokens} but spans {stop - start}")
        if not bool((branch.attribution[start:stop] == Attribution.POLICY).all()):
            self._refuse(f"{name} spans tokens that were not sampled")

    def _refuse(self, what: str) -> None:
        raise ValueError(f"inconsistent record of trajectory {self.trajectory_id}: {what}")


def trajectory_line(record: TrajectoryOutline) -> str:
    """A trajectory in one line, without its text."""
    facts = {
        "status": record.status,
        "cause": record.cause,
        "reward": reward_text(record.reward, getattr(record, "reward_cause", "")),
        "steps": len(record.steps),
        "actions": len(record.actions),
        "tokens": record.generated_tokens,
    }
    return named_repr(f"{type(record).__name__} {record.trajectory_id}", facts)


def trajectory_html(record: TrajectoryOutline) -> str:
    cause = f" by {record.cause}" if record.cause else ""
    facts: dict[str, object] = {
        "ended": f"{record.status}{cause}",
        "reward": reward_text(record.reward, getattr(record, "reward_cause", "")),
        "took": f"{record.finished_s - record.started_s:,.2f} s",
        "task": record.task_id,
        "steps, actions": f"{len(record.steps):,}, {len(record.actions):,}",
        "tokens generated": record.generated_tokens,
        "message": record.detail.partition("\n")[0],
    }
    head = ("step", "branch", "engine", "generated", "queue s", "prefill s", "decode s")
    rows = (
        (s.step_index, s.branch, s.engine_id, s.generated_tokens, s.queue_s, s.prefill_s, s.decode_s)
        for s in record.steps
    )
    tables = [rows_html(head, rows, len(record.steps))] if record.steps else []
    return facts_html(f"Trajectory {record.trajectory_id}", facts, *tables)


def reward_text(reward: float | None, cause: str) -> str:
    """A reward for people; one that failed with its cause."""
    if reward is not None:
        return f"{reward:g}"
    return f"unknown: failed by {cause}" if cause else "unknown"


def trajectory_to_body(record: TrajectoryRecord) -> dict[str, Any]:
    """The JSON-able form of a trajectory, from which `trajectory_from_body` makes an equal one.

    Steps and actions are stored as columns, so that names are written once.
    """
    body: dict[str, Any] = {each.name: getattr(record, each.name) for each in fields(TrajectoryRecord)}
    body["branches"] = [token_record_to_body(branch) for branch in record.branches]
    body["steps"] = _columns(record.steps, StepRecord)
    body["actions"] = _columns(record.actions, ActionRecord)
    return body


def trajectory_from_body(body: Mapping[str, Any]) -> TrajectoryRecord:
    """Read what `trajectory_to_body` made; `BadInput` if it did not make it."""
    with read_from(f"the journalled trajectory {str(body.get('trajectory_id'))[:60]!r}"):
        values = dict(body)
        values["branches"] = tuple(token_record_from_body(branch) for branch in body["branches"])
        values["steps"] = _rows(body["steps"], StepRecord)
        values["actions"] = _rows(body["actions"], ActionRecord)
        record = TrajectoryRecord(**values)
        check_types(record)
        return record


def token_record_to_body(record: TokenRecord) -> dict[str, Any]:
    """The JSON-able form of a token record.

    Arrays are base64 of little-endian bytes: exact for nan and float32, with half the size and a sixth of the time of
    lists of numbers (2,000 tokens: 15 kB in 0.1 ms). Authors and versions are run-length encoded.
    """
    sampled = record.loss_mask
    return {
        "ids": array_to_text(record.token_ids),
        "authors": [[int(s.attribution), s.stop - s.start] for s in record.segments()],
        "logprobs": array_to_text(record.logprobs[sampled]),
        "versions": _runs(record.policy_version[sampled]),
    }


def token_record_from_body(body: Mapping[str, Any]) -> TokenRecord:
    ids = array_from_text(body["ids"], np.int32)
    authors = _from_runs(body["authors"], np.uint8, len(ids))
    sampled = authors == Attribution.POLICY
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[sampled] = array_from_text(body["logprobs"], np.float32)
    versions = np.full(len(ids), -1, np.int32)
    versions[sampled] = _from_runs(body["versions"], np.int32, int(sampled.sum()))
    return TokenRecord.from_arrays(ids, authors, logprobs, versions)


def array_to_text(array: npt.NDArray[Any]) -> str:
    """Base64 of the little-endian bytes of a flat array."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode("ascii")


def array_from_text(text: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(base64.b64decode(text), little).astype(dtype)


def _runs(values: npt.NDArray[Any]) -> list[list[int]]:
    if not len(values):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    counts = np.diff(np.append(starts, len(values)))
    return [[int(v), int(n)] for v, n in zip(values[starts], counts, strict=True)]


def _from_runs(runs: Sequence[Sequence[int]], dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
    values, counts = np.array([value for value, _ in runs], dtype), [count for _, count in runs]
    if sum(counts) != length:
        raise ValueError(f"{sum(counts):,} authors or versions of {length:,} tokens")
    return np.repeat(values, counts) if runs else values


def _columns(rows: Sequence[Any], kind: type[Any]) -> dict[str, list[Any]]:
    return {each.name: [getattr(row, each.name) for row in rows] for each in fields(kind)}


def _rows(columns: Mapping[str, Sequence[Any]], kind: type[_Row]) -> tuple[_Row, ...]:
    names = list(columns)
    return tuple(kind(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True))
