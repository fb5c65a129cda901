"""One row of ``metrics.jsonl``: what a training step was trained on and what it did."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from heddle_dask.training.buffer_counts import BufferCounts
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.step_seconds import StepSeconds
from heddle_dask.training.trainer import TrainReport


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
        """By cause, since the last call."""
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
    ages = Counter(
        batch.step - 1 - member.first_version for group in batch.groups for member in group.members
    )
    return {str(age): ages[age] for age in sorted(ages)}


def _shares(groups: Mapping[str, int]) -> dict[str, float]:
    total = sum(groups.values())
    return {name: round(groups[name] / total, 4) for name in sorted(groups)} if total else {}
