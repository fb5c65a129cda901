"""How one attempt of an evaluation ended, and whether it is a sample of what is evaluated.

An attempt that the infrastructure has ended (an engine, a sandbox, a worker, the user) says nothing about the agent: it
is no sample, and is made again. One that the agent has ended early (its own error, its limits) is a sample that did not
pass. An attempt that came to its end and has no reward is neither: its verifier failed, or said nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from heddle_dask.records.causes import Ended
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import ActionRecord, TrajectoryOutline

Verdict = Literal["passed", "not-passed", "unknown", "infrastructure"]

PASSED_FROM: Final = 1.0
"""Least reward of an attempt that has passed, unless the user gives another."""
OF_THE_AGENT: Final = frozenset({"agent", "action", "context", "time", "no-progress"})
"""Causes of early ends that lie with the agent or its limits. All others are the infrastructure's."""
_LOST_REWARD: Final = frozenset({"lost", "unavailable", "rate-limited"})
"""Causes of an unknown reward that lie with the machines or services that were to compute it."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How one attempt ended, and what it took.

    Attributes
    ----------
    environment, domain
        Where the task is from; its kind there, empty without one.
    reward_cause
        Why the reward is unknown, as of `TrajectoryRecord`.
    last_action
        How its last action ended; empty without one. ``"lost"``: the machine that ran it has gone.
    llm_s
        Seconds of prefill and decode; those of steps whose engine reports none are taken as a whole.
    queue_s
        Seconds in which steps waited.
    tool_s
        Seconds in which an action ran and no step: of an agent that is itself an action, those of its own work.
    wall_s
        From its start to its end.
    """

    trajectory_id: str
    task_id: str
    environment: str
    domain: str
    status: str
    cause: str
    detail: str
    reward: float | None
    reward_cause: str
    last_action: str
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    llm_s: float
    queue_s: float
    tool_s: float
    wall_s: float

    def verdict(self, passed_from: float = PASSED_FROM) -> Verdict:
        """What it says of the agent.

        Parameters
        ----------
        passed_from
            Least reward of an attempt that has passed.
        """
        if self.status in ("failed", "aborted") and self.cause not in OF_THE_AGENT:
            return "infrastructure"
        if self.status == "failed" and self.cause == "action" and self.last_action == "lost":
            return "infrastructure"
        if self.reward is not None:
            return "passed" if self.reward >= passed_from else "not-passed"
        if self.reward_cause in _LOST_REWARD:
            return "infrastructure"
        return "unknown" if self.status == "completed" else "not-passed"

    @property
    def is_sample(self) -> bool:
        """Whether it counts as one of the attempts that were asked for; the others are made again."""
        return self.verdict() != "infrastructure"

    @property
    def ended(self) -> Ended:
        """How it ended, for counts by cause; a reward that failed is a cause too."""
        if self.status == "completed" and self.reward is None:
            return Ended(self.trajectory_id, "reward unknown", self.reward_cause, self.detail)
        return Ended(self.trajectory_id, self.status, self.cause, self.detail)


def outcome_of(
    record: TrajectoryOutline, domain: str = "", reward_cause: str = "", reward_detail: str = ""
) -> AttemptOutcome:
    """The outcome of a stored trajectory."""
    steps = [(step.submitted_s, step.finished_s) for step in record.steps]
    actions = [(each.finished_s - each.run_s, each.finished_s) for each in record.actions]
    queued_s = [step.queue_s for step in record.steps]
    return AttemptOutcome(
        trajectory_id=record.trajectory_id,
        task_id=record.task_id,
        environment=record.environment,
        # Arms have environments of their own, and the same kinds of tasks.
        domain=domain.removeprefix(record.environment).lstrip("/"),
        status=record.status,
        cause=record.cause,
        detail=record.detail or reward_detail,
        reward=record.reward,
        reward_cause=reward_cause,
        last_action=max(record.actions, key=_ended_s).status if record.actions else "",
        steps=len(record.steps),
        prompt_tokens=sum(step.prompt_tokens for step in record.steps),
        cached_tokens=sum(step.cached_tokens for step in record.steps),
        generated_tokens=record.generated_tokens,
        llm_s=sum(_llm_s(*each) for each in _engine_times(record)),
        queue_s=sum(each for each in queued_s if math.isfinite(each)),
        tool_s=covered_s([*actions, *steps]) - covered_s(steps),
        wall_s=_finite(record.finished_s - record.started_s),
    )


def outcomes_of_run(run: RunReader) -> Iterator[AttemptOutcome]:
    """The outcomes of the trajectories of a run, in its order; reads no tokens."""
    columns = (run.column(f"trajectories/{name}").tolist() for name in ("domain", "reward_cause", "reward_detail"))
    for index, facts in enumerate(zip(*columns, strict=True)):
        yield outcome_of(run.outline(index), *map(str, facts))


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in at least one of these spans; those with an unknown end are left out."""
    covered, reached = 0.0, -math.inf
    for start, stop in sorted(span for span in spans if all(map(math.isfinite, span))):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def _ended_s(action: ActionRecord) -> float:
    return _finite(action.finished_s)


def _engine_times(record: TrajectoryOutline) -> Iterator[tuple[float, float, float]]:
    for step in record.steps:
        whole_s = step.finished_s - step.submitted_s - (step.queue_s if math.isfinite(step.queue_s) else 0.0)
        yield step.prefill_s, step.decode_s, whole_s


def _llm_s(prefill_s: float, decode_s: float, whole_s: float) -> float:
    reported_s = prefill_s + decode_s
    return reported_s if math.isfinite(reported_s) else max(0.0, _finite(whole_s))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
