"""What the contexts of a run share, and recorded results of a trajectory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.wire.result_codec import step_from_body


class Clock(Protocol):
    """Seconds since the run began."""

    def __call__(self) -> float: ...


class JournalSink(Protocol):
    """Where results are journalled when they arrive."""

    def __call__(self, kind: str, body: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What all contexts of a run share.

    Attributes
    ----------
    max_context_tokens
        Prompt and generated tokens of a trajectory together: that of the budget, or what every engine takes.
    """

    session: str
    submitter: Submitter
    template: ChatTemplate
    budget: Budget
    max_context_tokens: int
    sampling: Sampling
    clock: Clock
    journal: JournalSink
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    pools: Pools = field(default_factory=Pools)


@dataclass(slots=True)
class Recorded:
    """Journalled results of a trajectory that is run again: steps in order, actions by their number.

    Attributes
    ----------
    idempotency_keys
        Of actions that are made again because their values cannot be replayed.
    branches
        The same of its forked branches and of its reward, by path.
    reward
        Its reward, where it was computed after the program.
    environment_failures, lost_tokens
        How often its environment has failed, and what the attempts before had sampled.
    """

    steps: deque[Mapping[str, Any]] = field(default_factory=deque)
    actions: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    idempotency_keys: dict[int, str] = field(default_factory=dict)
    branches: dict[str, Recorded] = field(default_factory=dict)
    reward: Mapping[str, Any] | None = None
    environment_failures: int = 0
    lost_tokens: int = 0

    def branch(self, path: str) -> Recorded:
        """The results of the forked branch of that path; of the first one, whose path is empty, these."""
        return self.branches.setdefault(path, Recorded()) if path else self

    def cancel(self, step_index: int) -> None:
        """The program cancelled that step: its sampled parts do not count, but the cancelled request is replayed."""
        while self.steps and self.steps[-1]["step_index"] == step_index and _is_answer(self.steps[-1]):
            self.steps.pop()
        self.steps.append({"step_index": step_index, "cancelled": True})

    def next_is_cancelled(self, step_index: int) -> bool:
        """Whether that step comes next, and was cancelled."""
        return bool(self.steps) and self.steps[0] == {"step_index": step_index, "cancelled": True}

    @property
    def generated_tokens(self) -> int:
        """Tokens that its steps sampled."""
        return sum(_sampled(body) for body in self._whole)

    @property
    def observed_tokens(self) -> int:
        """Tokens that were added to its context between its steps."""
        ends = [body["context_tokens"] + _sampled(body) for body in self._whole]
        begins = [body["context_tokens"] for body in self._whole]
        return sum(begin - end for end, begin in zip(ends, begins[1:], strict=False))

    @property
    def calls_made_again(self) -> int:
        """Number of calls, in all branches, whose values cannot be replayed."""
        return len(self.idempotency_keys) + sum(b.calls_made_again for b in self.branches.values())

    @property
    def _whole(self) -> list[Mapping[str, Any]]:
        return [body for body in self.steps if _is_answer(body)]

    @property
    def tools_s(self) -> float:
        """Seconds that its actions ran."""
        return float(sum(body["run_s"] for body in self.actions.values()))


def _is_answer(body: Mapping[str, Any]) -> bool:
    return "cancelled" not in body and "lost" not in body


def _sampled(body: Mapping[str, Any]) -> int:
    return len(step_from_body(body).generated.token_ids)
