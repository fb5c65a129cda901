"""What one run of a rollout returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.records.causes import CauseCount, CauseCounts, Ended
from heddle_dask.records.trajectory import TrajectoryRecord


@dataclass(frozen=True, slots=True)
class Batch:
    """The trajectories of one `Rollout.run`, in order of completion, and where they are stored."""

    trajectories: Sequence[TrajectoryRecord]
    makespan_s: float
    out: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return iter(self.trajectories)

    @property
    def reward_mean(self) -> float | None:
        """Mean over the trajectories whose reward is known; None when none is."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def generated_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(int(b.loss_mask.sum()) for t in self.trajectories for b in t.branches)

    @property
    def causes(self) -> tuple[CauseCount, ...]:
        """Trajectories that did not complete, by status and cause, with the first message of each; largest first."""
        return CauseCounts(Ended(t.trajectory_id, t.status, t.cause, t.detail) for t in self).rows()

    def _repr_html_(self) -> str:
        mean = "unknown" if self.reward_mean is None else f"{self.reward_mean:.3f}"
        rows = "".join(f"<tr><td>{status}</td><td>{n}</td></tr>" for status, n in self.counts.items())
        return (
            f"<p><b>{len(self)} trajectories</b> in {self.makespan_s:.1f} s, {self.generated_tokens} tokens, "
            f"mean reward {mean}</p><table>{rows}</table>"
        )
