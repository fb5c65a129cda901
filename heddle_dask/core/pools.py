"""What a run declares about shared resources that are no workers: quotas of APIs, and model services."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.errors import BadInput, check_count, check_seconds, is_finite
from heddle_dask.core.resources import Resources

_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

CPU_POOL = "cpu"
"""The pool of tool workers that name no other."""
GPU_POOL = "gpu"
"""The pool of workers that host model services."""


def checked_pool(name: str) -> str:
    """The name of a pool of tool workers, as given.

    Raises
    ------
    BadInput
        It is no short word, or the name of another pool.
    """
    if not _POOL_NAME.fullmatch(name) or name in (CPU_POOL, GPU_POOL):
        raise BadInput(
            f"pool {name!r}: use a name of at most 64 letters, digits, '-', '_' or '.', "
            f"and not {CPU_POOL} or {GPU_POOL}"
        )
    return name


@dataclass(frozen=True, slots=True)
class QuotaWindow:
    """At most `calls` calls begin in any period of `seconds` seconds (a sliding window)."""

    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ApiQuota:
    """The quota of one API: every repetition of a call counts as a call.

    Attributes
    ----------
    name
        As in ``Needs(api={name: 1})``.
    concurrency
        Most calls at the same time; 0: no limit.
    windows
        Limits per period, all of which hold at once.
    begins_within_s
        A call reaches the API within this many seconds after its action was started. None: at any time before its
        action ends, so that the call counts in every window until `seconds` after that end. A small number wins
        throughput where windows are short against the calls.
    backoff_s, max_backoff_s
        Seconds before the first repetition of a call, doubled for each further one, and their upper limit; jitter takes
        up to half of them off.
    failures_to_open, open_s
        Calls that fail one after the other until the circuit breaker opens, and seconds until it lets one call through.

    Raises
    ------
    BadInput
        A number that is not allowed.
    """

    name: str
    concurrency: int = 0
    windows: tuple[QuotaWindow, ...] = ()
    begins_within_s: float | None = None
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    failures_to_open: int = 5
    open_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise BadInput(f"quota: the name of the API is {self.name!r}: use a text")
        at = f"quota of {self.name}:"
        check_count(f"{at} concurrency", self.concurrency, least=0)
        check_count(f"{at} failures_to_open", self.failures_to_open)
        if isinstance(self.windows, str) or not isinstance(self.windows, Sequence):
            raise BadInput(f"{at} windows is {self.windows!r}: use a list of QuotaWindow(calls, seconds)")
        object.__setattr__(self, "windows", tuple(self.windows))
        for window in self.windows:
            if not isinstance(window, QuotaWindow):
                raise BadInput(f"{at} windows has {window!r}: use QuotaWindow(calls, seconds)")
            check_count(f"{at} calls of a window", window.calls)
            check_seconds(f"{at} seconds of a window", window.seconds)
        for name in ("backoff_s", "max_backoff_s", "open_s"):
            check_seconds(f"{at} {name}", getattr(self, name))
        within = self.begins_within_s
        if within is not None and not (is_finite(within) and within >= 0):
            raise BadInput(f"{at} begins_within_s is {within!r}: use seconds from 0 on, or None")

    @property
    def most_at_once(self) -> int | None:
        """Most calls that can be under way at the same time; None: no limit."""
        limits = [window.calls for window in self.windows]
        return min([*limits, self.concurrency] if self.concurrency else limits, default=None)


@dataclass(frozen=True, slots=True)
class PoolMaximum:
    """The largest worker that this pool may ever have, where it is known before one has joined.

    An action that needs more is refused at its request. An action that needs no more waits for such a worker.
    """

    pool: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class ModelService:
    """A model that serves requests on GPUs: a reward model, a judge, a teacher.

    Attributes
    ----------
    name
        As in ``Needs(service=name)``.
    gpus
        Numbers of GPUs on which it can be resident, in ascending order.
    pool
        Kind of host that can load it.
    load_s
        Seconds to restore it from host memory at each size, if known; empty: learned.
    host_bytes
        Bytes of its copy in host memory (one copy for each size); 0: not counted.
    batch
        Requests that one resident copy serves at the same time.
    cold_load_s
        Seconds to load it from its files at each size, if known; empty: learned.
    """

    name: str
    gpus: tuple[int, ...] = (1,)
    pool: str = "gpu"
    load_s: tuple[float, ...] = ()
    host_bytes: int = 0
    batch: int = 1
    cold_load_s: tuple[float, ...] = ()
