"""What the contexts of a run share, and the bounds of every trajectory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.live.driver.submission import Submitter
from heddle_dask.live.wire.result_codec import step_from_body

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one trajectory.

    Attributes
    ----------
    max_steps
        LLM steps.
    max_step_tokens
        Generated tokens of one step, unless the program asks for another limit.
    max_context_tokens
        Prompt and generated tokens together; never more than the engine takes.
    max_trajectory_s
        Wall-clock seconds from its admission; None: no limit. A trajectory that takes longer is truncated.
    tool_timeout_s
        Seconds of a tool call that sets no limit of its own (`Context.call`); None: no limit.
    max_run_s
        Wall-clock seconds of one `Rollout.run`, from the first submission; None: no limit. The run then ends as if it
        was interrupted, and can be resumed.
    max_action_bytes
        Limit of the arguments, and of the value, of one tool call, in bytes when pickled. A call that needs more fails.
    sandbox
        ``"strong"``, or ``"weak"`` to accept every sandbox of the tool workers (``docs/sandbox.md``).

    Raises
    ------
    BadInput
        A value is no number of its kind, or too small (context: below 2, other counts: below 1).
    """

    max_steps: int = 512
    max_step_tokens: int = 512
    max_context_tokens: int = 4096
    max_trajectory_s: float | None = None
    tool_timeout_s: float | None = 600.0
    max_run_s: float | None = None
    max_action_bytes: int = 64 << 20
    sandbox: str = "strong"

    @property
    def replayed(self) -> dict[str, int]:
        """The limits on which the steps of a program depend: a run can only be resumed with the same."""
        names = ("max_steps", "max_step_tokens", "max_context_tokens")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        check_count("budget: max_steps", self.max_steps)
        check_count("budget: max_step_tokens", self.max_step_tokens)
        check_count("budget: max_context_tokens", self.max_context_tokens, least=2)
        check_count("budget: max_action_bytes", self.max_action_bytes)
        for name in ("max_trajectory_s", "tool_timeout_s", "max_run_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (is_finite(seconds) and seconds > 0):
                raise BadInput(f"budget: {name} is {seconds!r}: use seconds above 0, or None")
        if self.sandbox not in ("strong", "weak"):
            raise BadInput(f"budget: sandbox is {self.sandbox!r}: use strong or weak")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How steps sample, unless the program says otherwise.

    Raises
    ------
    BadInput
        The temperature is not finite or negative, or top-p is not above 0 and at most 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not is_finite(self.temperature) or self.temperature < 0:
            raise BadInput(
                f"sampling: temperature is {self.temperature!r}: use a finite number of at least 0"
            )
        if not is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise BadInput(f"sampling: top_p is {self.top_p!r}: use a number above 0 and at most 1")


class Clock(Protocol):
    """Seconds since the run began."""

    def __call__(self) -> float: ...


class JournalSink(Protocol):
    """Where results are journalled when they arrive."""

    def __call__(self, kind: str, body: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What all contexts of a run share."""

    session: str
    submitter: Submitter
    template: ChatTemplate
    budget: Budget
    sampling: Sampling
    clock: Clock
    journal: JournalSink
    retries: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(slots=True)
class Recorded:
    """Journalled results of a trajectory that is run again: steps in order, actions by their number."""

    steps: deque[Mapping[str, Any]] = field(default_factory=deque)
    actions: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def cancel(self, step_index: int) -> None:
        """The program cancelled that step: its sampled parts do not count, but the cancelled request is replayed."""
        while self.steps and self.steps[-1]["step_index"] == step_index and "cancelled" not in self.steps[-1]:
            self.steps.pop()
        self.steps.append({"step_index": step_index, "cancelled": True})

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
    def _whole(self) -> list[Mapping[str, Any]]:
        return [body for body in self.steps if "cancelled" not in body]

    @property
    def tools_s(self) -> float:
        """Seconds that its actions ran."""
        return float(sum(body["run_s"] for body in self.actions.values()))


def _sampled(body: Mapping[str, Any]) -> int:
    return len(step_from_body(body).token_ids) // _ID_BYTES
