"""What the contexts of a run share, and the bounds of every trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.sampling import check_sampling
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.settings import configured


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


@dataclass(frozen=True, slots=True)
class Services:
    """What all contexts of a run share.

    Attributes
    ----------
    max_context_tokens
        Prompt and generated tokens of a trajectory together: that of the budget, or what every engine takes.
    clock
        Seconds since the run began.
    journal
        Takes a result, by its kind, when it arrives.
    """

    session: str
    submitter: Submitter
    template: ChatTemplate
    budget: Budget
    max_context_tokens: int
    sampling: Sampling
    clock: Callable[[], float]
    journal: Callable[[str, dict[str, Any]], None]
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    pools: Pools = field(default_factory=Pools)
