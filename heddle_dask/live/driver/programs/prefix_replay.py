"""Replays the prefix of an attempt: its program runs from the beginning and is given recorded replies.

What the program does between them it does again, so that its environment comes to the same state. Before each reply,
and before the first step of its own, the context must be the recorded one, token by token: a tool that answers
otherwise is seen there.
"""

from __future__ import annotations

import numpy as np

from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix


class PrefixDiverged(Exception):
    """The program, or its environment, did something else than in the recorded attempt."""


class PrefixReplay:
    """What is left of a prefix; None: the attempt has none."""

    def __init__(self, prefix: TrajectoryPrefix | None) -> None:
        self._prefix = prefix
        self.steps = 0  # that were replayed
        self._is_checked = prefix is None  # that the context behind the prefix is the recorded one

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The tokens of the replayed replies."""
        replies = () if self._prefix is None else self._prefix.replies[: self.steps]
        return [(step.token_start, step.token_stop) for step in replies]

    def next_reply(self, record: TokenRecord, continuations: int) -> StepRecord | None:
        """Append the next recorded reply, and return its step; None: the attempt goes on by itself.

        Raises
        ------
        PrefixDiverged
        """
        prefix = self._prefix
        if prefix is None or self._is_checked:
            return None
        if self.steps == prefix.steps:
            self._check(record, len(prefix.token_ids))
            self._is_checked = True
            return None
        step = prefix.replies[self.steps]
        self._check(record, step.token_start)
        if continuations > 1:
            raise PrefixDiverged(f"step {self.steps} asks for {continuations} continuations, the recorded one for one")
        record.append(prefix.token_ids[step.token_start : step.token_stop], Attribution.PREFIX)
        self.steps += 1
        return step

    def check_ended(self) -> None:
        """The program has ended: it must have gone beyond the prefix.

        Raises
        ------
        PrefixDiverged
        """
        if not self._is_checked:
            assert self._prefix is not None
            raise PrefixDiverged(f"it ended after {self.steps} of {self._prefix.steps} recorded steps")

    def refuse_before_end(self, why: str) -> None:
        """The program asks for what cannot be replayed.

        Raises
        ------
        PrefixDiverged
            A part of the prefix is left.
        """
        if not self._is_checked:
            raise PrefixDiverged(why)

    def _check(self, record: TokenRecord, tokens: int) -> None:
        assert self._prefix is not None
        if len(record) == tokens and np.array_equal(record.token_ids, self._prefix.token_ids[:tokens]):
            return
        known = min(len(record), tokens)
        differ = np.flatnonzero(record.token_ids[:known] != self._prefix.token_ids[:known])
        at = int(differ[0]) if len(differ) else known
        raise PrefixDiverged(
            f"before step {self.steps} the context differs from that of {self._prefix.source} at token {at} "
            f"({len(record)} tokens here, {tokens} there)"
        )
