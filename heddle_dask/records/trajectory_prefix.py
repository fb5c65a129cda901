"""The first steps of a recorded attempt, from which other attempts at the same task go on.

The steps are replayed: their tokens enter the context as they were recorded, masked, and the program runs its calls
again, so that the environment comes to the same state. That is checked by tokens: a result that differs from the
recorded one makes another context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord

PREFIX: Final = "prefix"
"""The entry of a trajectory's metadata that names its prefix (`TrajectoryPrefix.facts`)."""


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryPrefix:
    """What is replayed. `of` makes one.

    Attributes
    ----------
    source, prompt_key
        Id of the attempt that it is taken from, and the identity of its prompt.
    seed
        Of that attempt: programs that draw their environment from `Context.seed` get the same one.
    replies
        The steps that are replayed.
    token_ids
        The context of the step behind them: with their tokens and with what the environment answered.
    """

    source: str
    prompt_key: str
    seed: int
    replies: tuple[StepRecord, ...]
    token_ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, record: TrajectoryRecord, steps: int) -> TrajectoryPrefix:
        """The first `steps` steps of an attempt.

        Raises
        ------
        BadInput
            It has no such step and one behind it, has several branches, or has begun with a prefix itself.
        """
        where = f"a prefix of {record.trajectory_id}"
        if not begins_by_itself(record):
            raise BadInput(f"{where}: it has several branches or a prefix of its own: take an attempt that has neither")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps < len(record.steps):
            most = len(record.steps) - 1
            raise BadInput(f"{where}: steps is {steps!r}: use 1 to {most}" if most > 0 else f"{where}: it has one step")
        context: TokenRecord = record.branches[0]
        return cls(
            record.trajectory_id,
            record.prompt_key,
            record.seed,
            record.steps[:steps],
            context.token_ids[: record.steps[steps].token_start].copy(),
        )

    def first(self, steps: int) -> TrajectoryPrefix:
        """The first `steps` of these steps, at least one."""
        if steps == self.steps:
            return self
        tokens = self.replies[steps].token_start
        return replace(self, replies=self.replies[:steps], token_ids=self.token_ids[:tokens])

    @property
    def steps(self) -> int:
        """Number of steps that are replayed."""
        return len(self.replies)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the source had sampled in these steps."""
        return sum(step.generated_tokens for step in self.replies)

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of an attempt says of its prefix, under `PREFIX`."""
        return {
            "source": self.source,
            "steps": self.steps,
            "tokens": len(self.token_ids),
            "sampled_tokens": self.sampled_tokens,
        }


def prefix_facts(record: TrajectoryRecord) -> Mapping[str, Any] | None:
    """What a record says of its prefix; None: its first step is its own, and an entry of that name is its program's."""
    return record.metadata[PREFIX] if record.steps and record.steps[0].step_index else None


def begins_by_itself(record: TrajectoryRecord) -> bool:
    """Whether the steps of a record are all steps of one branch, from the first on."""
    return len(record.branches) == 1 and [step.step_index for step in record.steps] == list(range(len(record.steps)))
