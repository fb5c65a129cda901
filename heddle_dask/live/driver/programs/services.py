"""What the contexts of a run share, and the bounds of every trajectory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.sampling import check_sampling
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.settings import configured
from heddle_dask.live.wire.result_codec import step_from_body


@configured("budget", leave_out=("retries",))
@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one trajectory; what is not given comes from the settings ``heddle.budget``, if it is there.

    Attributes
    ----------
    max_steps
        LLM steps.
    max_step_tokens
        Generated tokens of one step, unless the program asks for another limit. None: what is left of the context.
    max_context_tokens
        Prompt and generated tokens together. None: as many as every engine takes. More than an engine takes is refused
        at the start.
    max_trajectory_s
        Wall-clock seconds from its admission; None: no limit. A trajectory that takes longer is truncated.
    tool_timeout_s
        Seconds of a tool call that sets no limit of its own (`Context.call`); None: no limit.
    max_run_s
        Wall-clock seconds of one `Rollout.run`, from the first submission; None: no limit. The run then ends as if it
        was interrupted, and can be resumed.
    max_action_bytes
        Limit of the arguments, and of the value, of one tool call, in bytes when pickled. A call that needs more fails.
    max_action_disk_bytes
        Limit of the scratch directory (``TMPDIR``) of one tool call in bytes, and of any file that it writes.
    max_action_processes
        Limit of the processes and threads of one tool call at a time.
    sandbox
        ``"strong"``, or ``"weak"`` to accept every sandbox of the tool workers (``docs/sandbox.md``).
    retries
        How often a step or an action is tried again.

    Raises
    ------
    BadInput
        A value is no number of its kind, or too small (context: below 2, other counts: below 1).
    """

    max_steps: int = 512
    max_step_tokens: int | None = None
    max_context_tokens: int | None = None
    max_trajectory_s: float | None = None
    tool_timeout_s: float | None = 600.0
    max_run_s: float | None = None
    max_action_bytes: int = 64 << 20
    max_action_disk_bytes: int = 10 << 30
    max_action_processes: int = 1024
    sandbox: str = "strong"
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def replayed(self) -> dict[str, int | None]:
        """The limits on which the steps of a program depend: a run can only be resumed with the same."""
        names = ("max_steps", "max_step_tokens", "max_context_tokens")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        check_count("budget: max_steps", self.max_steps)
        if self.max_step_tokens is not None:
            check_count("budget: max_step_tokens", self.max_step_tokens)
        if self.max_context_tokens is not None:
            check_count("budget: max_context_tokens", self.max_context_tokens, least=2)
        check_count("budget: max_action_bytes", self.max_action_bytes)
        disk_bytes = self.max_action_disk_bytes
        if type(disk_bytes) is not int or disk_bytes < 1 << 20:
            raise BadInput(f"budget: max_action_disk_bytes is {disk_bytes!r}: use whole bytes, 1 MiB or more")
        check_count("budget: max_action_processes", self.max_action_processes)
        for name in ("max_trajectory_s", "tool_timeout_s", "max_run_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (is_finite(seconds) and seconds > 0):
                raise BadInput(f"budget: {name} is {seconds!r}: use seconds above 0, or None")
        if self.sandbox not in ("strong", "weak"):
            raise BadInput(f"budget: sandbox is {self.sandbox!r}: use strong or weak")
        if not isinstance(self.retries, RetryPolicy):
            raise BadInput(f"budget: retries is {self.retries!r}: use RetryPolicy(…)")


@configured("sampling")
@dataclass(frozen=True, slots=True)
class Sampling:
    """How steps sample, unless the program says otherwise; settings: ``heddle.sampling``.

    Attributes
    ----------
    temperature
        0: greedy.
    top_p
        Tokens are drawn from the smallest set with this share of the probability.
    top_k
        Number of most likely tokens to draw from; 0: all.
    min_p
        Smallest probability of a token relative to that of the most likely one; 0: no limit.
    seeded
        True: each step has a seed of its own, which follows from the rollout's. On GPUs vLLM then samples request by
        request, without its fused sampler: slower. False: an engine draws from one generator, in the order in which
        steps happen to run. See ``docs/engines.md``.

    Raises
    ------
    BadInput
        The temperature is not finite or negative, top-p is not above 0 and at most 1, top-k is no whole number of at
        least 0, min-p is not from 0 to 1, or `seeded` is no bool.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seeded: bool = False

    def __post_init__(self) -> None:
        check_sampling("sampling", self.temperature, self.top_p, self.top_k, self.min_p)
        if not isinstance(self.seeded, bool):
            raise BadInput(f"sampling: seeded is {self.seeded!r}: use True or False")


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
