"""Quotas of APIs: concurrent calls, sliding windows, pauses that an API asks for, and its circuit breaker.

Exact, and amortised O(1) for each call and window. A call counts as concurrent until its action ends. When it reaches
its API is not known better than "between the start and the end of its action" (or within `ApiQuota.begins_within_s`
of the start), so a window counts it until `seconds` after the latest of these times: whatever the network does, the
API sees no window with more calls than its quota.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from heddle_dask.core.ids import ActionId
from heddle_dask.core.resources import ApiQuota, QuotaWindow, Resources, api_of, steps_of, unit_of
from heddle_dask.core.transitions import BREAKER, BreakerEvent, BreakerState

RATE_LIMITED: Final = "rate-limited"
UNAVAILABLE: Final = "unavailable"
REPEATED = frozenset({RATE_LIMITED, UNAVAILABLE})
"""Causes of an `ActionFinished` after which the call is repeated."""

NOTHING_SAID: Mapping[str, float | None] = MappingProxyType({})

MAX_OPEN_DOUBLINGS = 5
"""A breaker whose probes fail stays open for twice as long each time, up to 2**5 times `ApiQuota.open_s`."""


def backoff_s(quota: ApiQuota, action_id: ActionId, attempt: int) -> float:
    """Seconds before repetition `attempt` (from 1): exponential with equal jitter, the same for the same action.

    Half of the delay is fixed, so that no repetition follows at once; the other half is drawn from the action's id, so
    that a replay and a simulation draw the same.
    """
    doubled = quota.backoff_s * 2.0 ** min(attempt - 1, 60)
    most_s = min(quota.max_backoff_s, doubled)
    digest = blake2b(f"{action_id}/{attempt}".encode(), digest_size=8).digest()
    return most_s * (0.5 + 0.5 * int.from_bytes(digest, "big") / 2**64)


@dataclass(slots=True)
class CountedCall:
    """One call, or several of one action, in all windows of an account: from when, and how much."""

    date_s: float
    amount: int


class SlidingWindow:
    """The calls that count in one window, by the time from which their period runs.

    Attributes
    ----------
    counted
        Calls in the window as of the latest `advance`.
    """

    def __init__(self, window: QuotaWindow) -> None:
        self.window = window
        self.most = int(window.most)
        self.dated: deque[CountedCall] = deque()
        self.counted = 0
        self.at = 0.0

    def add(self, counted: CountedCall) -> None:
        """Count a call from its date on; dates never go back."""
        self.dated.append(counted)
        self.counted += counted.amount

    def settle(self, counted: CountedCall, used: int) -> None:
        """A call has used another amount than was counted; before that is noted in `counted`."""
        if counted.date_s + self.window.seconds > self.at:
            self.counted += used - counted.amount

    def advance(self, at: float) -> None:
        """Drop the calls whose period is over at this time."""
        self.at = at
        while self.dated and self.dated[0].date_s + self.window.seconds <= at:
            self.counted -= self.dated.popleft().amount

    def frees_s(self, missing: int) -> float | None:
        """When `missing` more calls than now will have left the window; None: not by time alone."""
        for each in self.dated:
            missing -= each.amount
            if missing <= 0:
                return each.date_s + self.window.seconds
        return None


@dataclass(slots=True)
class BlockedSeconds:
    """Seconds in which something was the case, counted from one look to the next."""

    total_s: float = 0.0
    since_s: float | None = None

    def note(self, at: float, blocked: bool) -> None:
        """It is (not) the case from now on."""
        self.total_s = self.until(at)
        self.since_s = at if blocked else None

    def until(self, at: float) -> float:
        """Seconds up to this time."""
        return self.total_s + (0.0 if self.since_s is None else at - self.since_s)


@dataclass(frozen=True, slots=True)
class ApiWait:
    """An action that waits for an API: since when, for how many calls, and `BlockedSeconds` of the API at that time."""

    since_s: float
    calls: int
    blocked_s: float


@dataclass(slots=True, eq=False)
class Api:
    """What the controller knows of one API.

    Attributes
    ----------
    undated
        Those of them that may still reach the API: with the time of their start, in this order.
    dated
        The others of them, as they are counted.
    paused_until_s
        The API asked to be left alone until then.
    failures
        Failed calls since the latest success.
    openings
        Times that the breaker opened since it was closed.
    probes
        Actions that may tell whether the API is back, while the breaker is half-open.
    waiting
        Actions that wait for it, oldest first, with the time from which they wait and the calls that they need.
    blocked
        Seconds in which the quota held back what waited.
    """

    quota: ApiQuota
    waiting: dict[ActionId, ApiWait] = field(default_factory=dict)
    blocked: BlockedSeconds = field(default_factory=BlockedSeconds)
    running: dict[ActionId, int] = field(default_factory=dict)
    undated: dict[ActionId, float] = field(default_factory=dict)
    dated: dict[ActionId, CountedCall] = field(default_factory=dict)
    windows: list[SlidingWindow] = field(default_factory=list)
    paused_until_s: float = 0.0
    breaker: BreakerState = BreakerState.CLOSED
    failures: int = 0
    openings: int = 0
    open_until_s: float = 0.0
    probes: dict[ActionId, None] = field(default_factory=dict)
    _calls: int = 0
    _undated_calls: int = 0

    def __post_init__(self) -> None:
        self.windows = [SlidingWindow(window) for window in self.quota.windows]

    def replace_quota(self, quota: ApiQuota) -> None:
        """Take another quota for the same API; the new windows know as many calls as the longest of the old ones."""
        longest = max(self.windows, key=lambda each: each.window.seconds, default=None)
        self.quota = quota
        self.windows = [SlidingWindow(window) for window in quota.windows]
        for window in self.windows:
            for counted in () if longest is None else longest.dated:
                window.add(counted)

    def advance(self, at: float) -> None:
        """Bring windows and breaker to this time."""
        within_s = self.quota.begins_within_s
        while within_s is not None and self.undated:
            action_id, started_s = next(iter(self.undated.items()))
            if started_s + within_s > at:
                break
            self._date(action_id, started_s + within_s)
        for window in self.windows:
            window.advance(at)
        if self.breaker is BreakerState.OPEN and self.open_until_s <= at:
            self._step(BreakerEvent.COOLED)

    def _step(self, event: BreakerEvent) -> bool:
        after = BREAKER.next_state(self.breaker, event, f"api {self.quota.name}")
        changed = after is not None and after is not self.breaker
        self.breaker = self.breaker if after is None else after
        return changed

    def _date(self, action_id: ActionId, date_s: float) -> None:
        del self.undated[action_id]
        calls = self.running[action_id]
        self._undated_calls -= calls
        counted = self.dated[action_id] = CountedCall(date_s, calls)
        for window in self.windows:
            window.add(counted)

    def free(self, at: float) -> int | None:
        """Calls that may start now; None: any number."""
        self.advance(at)
        if self.breaker is BreakerState.OPEN or self.paused_until_s > at:
            return 0
        limits = [each.most - each.counted - self._undated_calls for each in self.windows]
        if self.quota.concurrency:
            limits.append(self.quota.concurrency - self._calls)
        if self.breaker is BreakerState.HALF_OPEN:
            limits.append(self._probe_calls() - sum(self.running[each] for each in self.probes))
        return None if not limits else max(0, min(limits))

    def _probe_calls(self) -> int:
        """Calls that a half-open breaker lets through: what the action that waits longest needs."""
        oldest = next(iter(self.waiting.values()), None)
        return 1 if oldest is None else oldest.calls

    def next_s(self, at: float, calls: int) -> float | None:
        """When `calls` calls may start, if nothing ends before; None: now, or not by time alone."""
        self.advance(at)
        times = [self.paused_until_s] if self.paused_until_s > at else []
        if self.breaker is BreakerState.OPEN:
            times.append(self.open_until_s)
        elif self.breaker is BreakerState.HALF_OPEN and self.probes:
            return None
        if self.quota.concurrency and self.quota.concurrency - self._calls < calls:
            return None
        for window in self.windows:
            missing = calls + window.counted + self._undated_calls - window.most
            if missing > 0:
                frees_s = window.frees_s(missing)
                if frees_s is None:
                    # Calls whose time of arrival is not known yet: at best the oldest of them is next.
                    frees_s = self._dated_by_time()
                if frees_s is None:
                    return None
                times.append(frees_s)
        return max(times, default=None)

    def _dated_by_time(self) -> float | None:
        within_s = self.quota.begins_within_s
        if within_s is None or not self.undated:
            return None
        return next(iter(self.undated.values())) + within_s

    def is_shut(self, at: float) -> bool:
        """Whether no call passes, however few run."""
        self.advance(at)
        return self.breaker is BreakerState.OPEN or self.paused_until_s > at

    def take(self, action_id: ActionId, calls: int, at: float) -> None:
        """An action starts that makes these calls."""
        self.advance(at)
        self.running[action_id] = calls
        self.undated[action_id] = at
        self._calls += calls
        self._undated_calls += calls
        if self.breaker is BreakerState.HALF_OPEN:
            self.probes[action_id] = None
        self.advance(at)

    def give_back(self, action_id: ActionId, at: float, ran: bool = True, used: int | None = None) -> None:
        """The action has ended, or was lost with its host: its calls are over, or were never made (not `ran`).

        Parameters
        ----------
        used
            What it says that it has used, where that is not what it has declared; None: it does not say.
        """
        self.advance(at)
        if action_id in self.undated:
            if ran:
                self._date(action_id, at)
            else:
                del self.undated[action_id]
                self._undated_calls -= self.running[action_id]
        counted = self.dated.pop(action_id, None)
        if counted is not None and used is not None:
            for window in self.windows:
                window.settle(counted, used)
            counted.amount = used
        self._calls -= self.running.pop(action_id)
        self.probes.pop(action_id, None)
        self.advance(at)

    def judge(self, action_id: ActionId, cause: str, retry_after_s: float | None, at: float) -> bool:
        """Take how a call ended, before `give_back`; returns whether the breaker has opened or closed.

        Parameters
        ----------
        cause
            As in `ActionFinished`; empty: it succeeded. Causes of the tool itself (``"raised"``) say nothing about the
            API.
        """
        self.advance(at)
        if retry_after_s is not None:
            self.paused_until_s = max(self.paused_until_s, at + retry_after_s)
        if self.breaker is BreakerState.HALF_OPEN and action_id not in self.probes:
            return False  # of a call that began before the breaker opened
        if not cause:
            if self.breaker is not BreakerState.OPEN:
                self.failures = self.openings = 0
            return self._step(BreakerEvent.SUCCEEDED)
        # An API that says when to come back works: its pause is enough.
        if cause not in (*REPEATED, "timeout") or (cause == RATE_LIMITED and retry_after_s is not None):
            return False
        if self.breaker is BreakerState.CLOSED:
            self.failures += 1
        too_often = self.failures >= self.quota.failures_to_open
        opened = self._step(BreakerEvent.FAILED_TOO_OFTEN if too_often else BreakerEvent.FAILED)
        if opened:
            self.open_until_s = at + self.quota.open_s * 2 ** min(self.openings, MAX_OPEN_DOUBLINGS)
            self.openings += 1
        return opened

    def check_integrity(self) -> None:
        """Recompute every sum and compare."""
        name = self.quota.name
        assert self._calls == sum(self.running.values()), name
        assert self._undated_calls == sum(self.running[each] for each in self.undated), name
        assert {*self.undated, *self.dated} == self.running.keys(), name
        assert self.probes.keys() <= self.running.keys(), name
        for window in self.windows:
            assert window.counted == sum(each.amount for each in window.dated), name


class ApiPool:
    """All APIs of a controller; one without a declared quota has no limit, but pauses and a breaker.

    The tokens and the cost of an API (`METERS`) are accounts of their own, which neither pause nor break.

    Attributes
    ----------
    wanted
        APIs for which actions wait.
    """

    def __init__(self) -> None:
        self.apis: dict[str, Api] = {}
        self.wanted: dict[str, None] = {}

    def declare(self, quota: ApiQuota) -> None:
        """A run declares a quota; the same one again changes nothing."""
        for account in quota.accounts():
            known = self.apis.get(account.name)
            if known is None:
                self.apis[account.name] = Api(account)
            elif known.quota != account:
                known.replace_quota(account)

    def of(self, name: str) -> Api:
        """The API of that name, without a limit where no run has declared one."""
        api = self.apis.get(name)
        if api is None:
            api = self.apis[name] = Api(ApiQuota(name))
        return api

    def free(self, name: str, at: float) -> int | None:
        """Calls of this API that may start now; None: any number."""
        api = self.apis.get(name)
        return None if api is None else api.free(at)

    def admits(self, need: Resources, at: float) -> bool:
        """Whether the calls among these resources may start now."""
        frees = ((self.free(name, at), calls) for name, calls in calls_of(need))
        return all(free is None or free >= calls for free, calls in frees)

    def wait(self, action_id: ActionId, least: Resources, at: float) -> None:
        """An action waits from now on, with these smallest amounts."""
        for name, calls in calls_of(least):
            api = self.of(name)
            api.waiting[action_id] = ApiWait(at, calls, api.blocked.until(at))
            self.wanted[name] = None

    def stop_waiting(self, action_id: ActionId, least: Resources) -> None:
        """The action has started, or is given up; one that does not wait is ignored."""
        for name, _ in calls_of(least):
            api = self.of(name)
            api.waiting.pop(action_id, None)
            if not api.waiting:
                self.wanted.pop(name, None)

    def take(self, action_id: ActionId, resources: Resources, at: float) -> None:
        for name, calls in calls_of(resources):
            self.of(name).take(action_id, calls, at)

    def give_back(
        self,
        action_id: ActionId,
        resources: Resources,
        at: float,
        ran: bool = True,
        used: Mapping[str, float | None] = NOTHING_SAID,
    ) -> None:
        """The inverse of `take`; calls that were made still count in the windows, with what they say to have used."""
        for name, _ in calls_of(resources):
            said = used.get(unit_of(name))
            self.of(name).give_back(action_id, at, ran, None if said is None else steps_of(unit_of(name), said))

    def next_s(self, at: float, patience_s: float) -> float | None:
        """The next time at which waiting actions may start, or have waited long enough; None: not by time alone."""
        times: list[float] = []
        for name in self.wanted:
            api = self.apis[name]
            oldest = next(iter(api.waiting.values()))
            frees_s = api.next_s(at, oldest.calls)
            if frees_s is not None:
                times.append(frees_s)
            if api.is_shut(at):
                times.append(oldest.since_s + patience_s)
        return min(times, default=None)

    def impatient(self, at: float, patience_s: float) -> Iterator[tuple[ActionId, str]]:
        """Actions that have waited for `patience_s` for an API that is shut, and the cause in one line."""
        for name in self.wanted:
            api = self.apis[name]
            if not api.is_shut(at):
                continue
            why = "its circuit breaker is open" if api.breaker is BreakerState.OPEN else "it asks to be left alone"
            for action_id, wait in api.waiting.items():
                if wait.since_s + patience_s > at:
                    break
                yield action_id, f"it waited {at - wait.since_s:.0f} s for api {name}: {why}"

    def note_blocked(self, at: float) -> None:
        """After an allocation: which APIs hold back what waits for them, from now on."""
        for name in self.wanted:
            api = self.apis[name]
            free = api.free(at)
            oldest = next(iter(api.waiting.values()))
            api.blocked.note(at, free is not None and free < oldest.calls)

    def blocked_s(self, action_id: ActionId, least: Resources, at: float) -> float:
        """Seconds for which the quotas of its APIs have held this waiting action back; of several APIs, the longest."""
        waits = [(api, api.waiting[action_id]) for api in (self.of(name) for name, _ in calls_of(least))]
        return max((api.blocked.until(at) - wait.blocked_s for api, wait in waits), default=0.0)


def calls_of(resources: Resources) -> Iterator[tuple[str, int]]:
    """The APIs among these resources, with their calls; and the accounts of their meters, with tokens and cost."""
    for resource, calls in resources:
        name = api_of(resource)
        if name is not None:
            yield name, calls


def apis_of(resources: Resources) -> list[str]:
    """The APIs among these resources, without their meters."""
    return [name for name, _ in calls_of(resources) if unit_of(name) == "calls"]
