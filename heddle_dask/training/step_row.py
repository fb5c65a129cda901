"""The row of ``metrics.jsonl`` that is written when a training step is done, and what the step spent its time on.

Pure: times, counts and the report come in.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from heddle_dask.training.buffer_events import BufferCounts
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.loop import (
    BatchReady,
    FormBatch,
    LoopCommand,
    LoopEvent,
    OpenBatches,
    PublishEnded,
    PublishVersion,
    StepTrained,
    SwitchEnded,
    SwitchVersion,
    TrainOnBatch,
    WeightsCopied,
)
from heddle_dask.training.trainer import TrainReport


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one training step, or of several; phases overlap, so they may sum to more than passed.

    Attributes
    ----------
    rollout
        From when tasks of the batch could be taken until it was formed.
    wait
        The part of it in which the trainer had nothing else to do than to wait for the batch.
    train
        Load, forward, backward, optimiser step, copies for a checkpoint.
    publish
        Writing the weights into the store.
    install
        From the wish to switch until every engine sampled with the newer weights; engines generate meanwhile.
    """

    rollout: float = 0.0
    wait: float = 0.0
    train: float = 0.0
    publish: float = 0.0
    install: float = 0.0

    def plus(self, other: StepSeconds) -> StepSeconds:
        mine, theirs = asdict(self), asdict(other)
        return StepSeconds(**{name: mine[name] + theirs[name] for name in mine})

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


class StepClock:
    """Follows a loop and adds up seconds, from one `take` to the next.

    A row of metrics is written when its step is trained. What it says of publishing and installing is therefore of the
    weights of the step before.
    """

    def __init__(self) -> None:
        self._began: dict[LoopEvent, float] = {}
        self._opened: dict[int, float] = {}
        self._opened_through = 0
        self._waits_since = 0.0
        self._copied = -1
        self._seconds = StepSeconds()

    def gave(self, at: float, commands: Iterable[LoopCommand]) -> None:
        for command in commands:
            match command:
                case OpenBatches(through):
                    for batch in range(self._opened_through + 1, through + 1):
                        self._opened[batch] = at
                    self._opened_through = max(self._opened_through, through)
                case FormBatch(step):
                    self._began[BatchReady(step)] = at
                    self._waits_since = at
                case TrainOnBatch(step):
                    self._began[StepTrained(step)] = at
                case PublishVersion(number):
                    self._began[PublishEnded(number)] = self._began[WeightsCopied(number)] = at
                case SwitchVersion(number):
                    self._began[SwitchEnded(number)] = at

    def took(self, at: float, event: LoopEvent) -> None:
        """The loop was told this; call it before the commands that follow from it."""
        began = self._began.pop(event, None)
        if began is None:
            return
        match event:
            case BatchReady(step):
                self._add(rollout=at - self._opened.pop(step, began), wait=max(0.0, at - self._waits_since))
            case StepTrained():
                self._add(train=at - began)
            case WeightsCopied(number):
                # While it copies its weights, the trainer does not wait.
                self._copied, self._waits_since = number, max(self._waits_since, at)
            case PublishEnded(number):
                self._add(publish=at - began)
                if self._copied != number:  # it wrote them itself
                    self._waits_since = max(self._waits_since, at)
            case SwitchEnded():
                self._add(install=at - began)

    def take(self) -> StepSeconds:
        taken, self._seconds = self._seconds, StepSeconds()
        return taken

    def _add(self, **seconds: float) -> None:
        self._seconds = self._seconds.plus(StepSeconds(**seconds))


class WasteMeter:
    """Tokens that no batch takes, by cause: what came on top since the last `take`.

    What the buffer drops is counted there, what never reached it by the stream of groups. Both count on.
    """

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()

    def skip(self, counts: BufferCounts, of_stream: Mapping[str, int]) -> None:
        """What was wasted so far is in earlier rows: a buffer that was rebuilt from its log has counted it."""
        self._before = counts.dropped_tokens + Counter(of_stream)

    def take(self, counts: BufferCounts, of_stream: Mapping[str, int]) -> dict[str, int]:
        now = counts.dropped_tokens + Counter(of_stream)
        new, self._before = now - self._before, now
        return dict(sorted(new.items()))


def step_row(
    batch: TrainingBatch,
    report: TrainReport,
    counts: BufferCounts,
    *,
    wasted_tokens: Mapping[str, int],
    mix_sampled: Mapping[str, int],
    seconds: StepSeconds,
    elapsed_s: float,
    generated_tokens: int,
    held_out: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The row of a step; JSON-able, but for nan.

    Parameters
    ----------
    wasted_tokens, seconds
        Since the row before.
    mix_sampled
        Tasks that were begun, by environment.
    elapsed_s, generated_tokens
        Since this process began.
    held_out
        The newest row of ``evaluations.jsonl``.
    """
    members = [member for group in batch.groups for member in group.members]
    rewards = [member.reward for member in members]
    return {
        "step": batch.step,
        "lineage": batch.lineage,
        "reward": statistics.fmean(rewards),
        "reward_spread": statistics.pstdev(rewards),
        "held_out_reward": held_out and held_out["reward"],
        "held_out_number": held_out and held_out["number"],
        "groups": len(batch.groups),
        "samples": len(members),
        "tokens": sum(member.trained_tokens for member in members),
        "truncated_share": sum(member.truncated for member in members) / len(members),
        "without_variance_share": counts.share_without_variance,
        "staleness": _staleness(batch),
        "wasted_tokens": dict(wasted_tokens),
        "mix_sampled": _shares(mix_sampled),
        "mix_consumed": _shares(counts.trained_groups),
        "lengths_sampled": asdict(counts.sampled_lengths),
        "lengths_trained": asdict(counts.trained_lengths),
        "tokens_per_s": generated_tokens / elapsed_s if elapsed_s > 0 else 0.0,
        "elapsed_s": round(elapsed_s, 3),
        "seconds": seconds.rounded(),
        "trainer": dict(report.metrics),
        "trainer_seconds": dict(report.seconds),
    }


def _staleness(batch: TrainingBatch) -> dict[str, int]:
    """Trajectories by n - b, where n steps were finished when the batch was formed."""
    ages = Counter(batch.step - 1 - member.first_version for group in batch.groups for member in group.members)
    return {str(age): ages[age] for age in sorted(ages)}


def _shares(groups: Mapping[str, int]) -> dict[str, float]:
    total = sum(groups.values())
    return {name: round(groups[name] / total, 4) for name in sorted(groups)} if total else {}
