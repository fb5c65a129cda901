"""What the attempts of one arm say: pass@k, mean reward, intervals, costs, causes; and how two arms differ.

Every figure is a mean over tasks, each of which counts once however many attempts it has. Attempts at one task are not
independent of one another, so that intervals are over tasks: tasks are resampled with all their attempts (95 %,
percentile bootstrap, seeded).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from heddle_dask.core.nouns import joined_domain
from heddle_dask.evaluation.attempt_outcomes import PASSED_FROM, AttemptOutcome, Verdict
from heddle_dask.records.causes import CauseCount, CauseCounts
from heddle_dask.training.intervals import MeanInterval, bootstrap_mean, paired_difference


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that one of `k` attempts passes, unbiased (Chen et al. 2021), of `samples` with `passed` of them.

    Raises
    ------
    ValueError
        Fewer samples than `k`, or more that passed than samples.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {samples} attempts, {passed} of which passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The attempts of one arm at one task.

    Attributes
    ----------
    samples
        Those that passed or did not; `unknown` and `infrastructure` are apart.
    reward
        Mean of the known rewards; None where there is none.
    """

    task_id: str
    domain: str
    samples: int
    passed: int
    unknown: int
    infrastructure: int
    reward: float | None
    rewards_known: int
    generated_tokens: float  # mean of the samples, as are the seconds
    wall_s: float
    causes: tuple[CauseCount, ...] = ()

    @property
    def pass_rate(self) -> float | None:
        return self.passed / self.samples if self.samples else None


@dataclass(frozen=True, slots=True)
class AttemptCosts:
    """What attempts took: of all of them in sum, those of the infrastructure's failures included."""

    attempts: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    llm_s: float
    queue_s: float
    tool_s: float
    wall_s: float

    @classmethod
    def of(cls, outcomes: Sequence[AttemptOutcome]) -> AttemptCosts:
        names = [name for name in cls.__dataclass_fields__ if name != "attempts"]
        return cls(len(outcomes), *(sum(getattr(each, name) for each in outcomes) for name in names))


@dataclass(frozen=True, slots=True)
class PassEstimate:
    """Figures over some tasks.

    Attributes
    ----------
    tasks
        Those with at least one sample.
    pass_at
        By `k`: the estimate over the tasks with at least `k` samples. A `k` that no task has is not there.
    tasks_at
        How many tasks those are.
    reward
        Mean over tasks of their mean known reward.
    """

    tasks: int
    samples: int
    passed: int
    unknown: int
    infrastructure: int
    pass_at: Mapping[int, MeanInterval]
    tasks_at: Mapping[int, int]
    reward: MeanInterval | None
    rewards_known: int


@dataclass(frozen=True, slots=True)
class EvaluatedArm:
    """One agent or model on its tasks.

    Attributes
    ----------
    by_domain
        The same figures over the tasks of each domain; empty where there is one.
    of_the_agent, of_the_infrastructure, of_the_reward
        Early ends by cause, largest first; and rewards that are unknown.
    """

    name: str
    overall: PassEstimate
    by_domain: Mapping[str, PassEstimate]
    tasks: Mapping[str, TaskOutcome]
    costs: AttemptCosts
    of_the_agent: tuple[CauseCount, ...]
    of_the_infrastructure: tuple[CauseCount, ...]
    of_the_reward: tuple[CauseCount, ...]

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, task by task too."""
        return {
            "name": self.name,
            **estimate_json(self.overall),
            "domains": {name: estimate_json(each) for name, each in self.by_domain.items()},
            "costs": {name: _rounded(value) for name, value in asdict(self.costs).items()},
            "failures": {
                "agent": [each.as_json() for each in self.of_the_agent],
                "infrastructure": [each.as_json() for each in self.of_the_infrastructure],
                "reward": [each.as_json() for each in self.of_the_reward],
            },
            "by_task": {
                name: {"samples": each.samples, "passed": each.passed, "reward": _rounded(each.reward)}
                for name, each in self.tasks.items()
            },
        }


def evaluated_arm(
    name: str, outcomes: Iterable[AttemptOutcome], ks: Sequence[int] = (1,), passed_from: float = PASSED_FROM
) -> EvaluatedArm:
    """What the attempts of an arm say.

    Parameters
    ----------
    ks
        The `k` of pass@k.
    passed_from
        Least reward of an attempt that has passed.
    """
    every = list(outcomes)
    if len({each.environment for each in every}) > 1:  # a mix
        every = [replace(each, domain=joined_domain(each.environment, each.domain)) for each in every]
    by_task: dict[str, list[AttemptOutcome]] = {}
    for each in every:
        by_task.setdefault(each.task_id, []).append(each)
    tasks = {task: _task_outcome(task, by_task[task], passed_from) for task in sorted(by_task)}
    domains = sorted({task.domain for task in tasks.values()})
    parts = {domain: [task for task in tasks.values() if task.domain == domain] for domain in domains}

    def causes(*verdicts: Verdict) -> tuple[CauseCount, ...]:
        return CauseCounts(each.ended for each in every if each.verdict(passed_from) in verdicts).rows()

    return EvaluatedArm(
        name,
        _estimate(list(tasks.values()), ks),
        {domain: _estimate(part, ks) for domain, part in parts.items()} if len(parts) > 1 else {},
        tasks,
        AttemptCosts.of(every),
        causes("not-passed", "passed"),
        causes("infrastructure"),
        causes("unknown"),
    )


def arm_difference(
    before: EvaluatedArm, after: EvaluatedArm, figure: Callable[[TaskOutcome], float | None] = lambda t: t.pass_rate
) -> tuple[MeanInterval, int] | None:
    """Mean of after - before over the tasks that both have samples of, with its interval, and how many they are.

    Paired by task, so that the difficulty of tasks does not count. None without a common task.
    """
    sides = [
        {name: value for name, task in arm.tasks.items() if (value := figure(task)) is not None}
        for arm in (before, after)
    ]
    common = sides[0].keys() & sides[1].keys()
    return (paired_difference(*sides), len(common)) if common else None


def ks_up_to(samples: int) -> tuple[int, ...]:
    """1, 2, 4, … up to the number of samples, and this number itself."""
    powers = [1 << power for power in range(samples.bit_length())]
    return tuple(sorted({*(k for k in powers if k <= samples), samples}))


def estimate_json(estimate: PassEstimate) -> dict[str, Any]:
    """Figures over tasks as JSON, each with its interval."""
    return {
        "tasks": estimate.tasks,
        "samples": estimate.samples,
        "passed": estimate.passed,
        "unknown": estimate.unknown,
        "infrastructure": estimate.infrastructure,
        "pass_at": {
            str(k): {**interval_json(each), "tasks": estimate.tasks_at[k]} for k, each in estimate.pass_at.items()
        },
        "reward": None if estimate.reward is None else interval_json(estimate.reward),
        "rewards_known": estimate.rewards_known,
    }


def interval_json(interval: MeanInterval) -> dict[str, Any]:
    return {"mean": _rounded(interval.mean), "ci": [_rounded(each) for each in interval.bounds]}


def _rounded(value: float | None) -> float | None:
    return round(value, 6) if isinstance(value, float) else value


def _task_outcome(task_id: str, outcomes: Sequence[AttemptOutcome], passed_from: float) -> TaskOutcome:
    verdicts = [each.verdict(passed_from) for each in outcomes]
    samples = [each for each, verdict in zip(outcomes, verdicts, strict=True) if verdict != "infrastructure"]
    rewards = [each.reward for each in samples if each.reward is not None]
    return TaskOutcome(
        task_id,
        outcomes[0].domain,
        verdicts.count("passed") + verdicts.count("not-passed"),
        verdicts.count("passed"),
        verdicts.count("unknown"),
        verdicts.count("infrastructure"),
        statistics.fmean(rewards) if rewards else None,
        len(rewards),
        statistics.fmean(each.generated_tokens for each in samples) if samples else 0.0,
        statistics.fmean(each.wall_s for each in samples) if samples else 0.0,
        CauseCounts(each.ended for each in outcomes).rows(),
    )


def _estimate(tasks: Sequence[TaskOutcome], ks: Sequence[int]) -> PassEstimate:
    sampled = [task for task in tasks if task.samples]
    pass_at, tasks_at = {}, {}
    for k in ks:
        values = [pass_at_k(task.samples, task.passed, k) for task in sampled if task.samples >= k]
        if values:
            pass_at[k], tasks_at[k] = bootstrap_mean(values), len(values)
    rewards = [task.reward for task in tasks if task.reward is not None]
    return PassEstimate(
        tasks=len(sampled),
        samples=sum(task.samples for task in tasks),
        passed=sum(task.passed for task in tasks),
        unknown=sum(task.unknown for task in tasks),
        infrastructure=sum(task.infrastructure for task in tasks),
        pass_at=pass_at,
        tasks_at=tasks_at,
        reward=bootstrap_mean(rewards) if rewards else None,
        rewards_known=sum(task.rewards_known for task in tasks),
    )
