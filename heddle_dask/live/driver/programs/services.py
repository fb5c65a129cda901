"""What the contexts of a run share, and recorded results of a trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget, Sampling


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
