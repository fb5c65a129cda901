"""Quotas of APIs: windows against brute force, random histories, repetitions, pauses, the circuit breaker."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, host_of, trajectory_spec
from worlds.integrity import check_integrity

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput, GuardViolation
from heddle_dask.core.ids import ActionId, HostId, TrajectoryId
from heddle_dask.core.journal_codec import decode, encode, replay
from heddle_dask.core.needs import Needs
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.quotas import RATE_LIMITED, UNAVAILABLE, Api, backoff_s
from heddle_dask.core.resources import (
    Amounts,
    ApiQuota,
    QuotaUnit,
    QuotaWindow,
    ResourceDemand,
    Resources,
    api_resource,
)
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.transitions import BreakerState
from heddle_dask.core.view import ClusterView, Grant
from heddle_dask.strategies.presets import build_strategies

SEARCH = "search"


def call_of(
    name: str,
    trajectory: str = "t",
    *,
    attempt: int = 0,
    api: str = SEARCH,
    calls: Amounts | int = 1,
    tokens: int = 0,
    cost: float = 0.0,
) -> ActionRequest:
    """An action that makes calls of an API and needs nothing of its host."""
    metered = Needs(api={api: 1}, tokens=tokens, cost=cost).demand()
    demand = ResourceDemand.of({**dict(metered), api_resource(api): calls})
    return ActionRequest(ActionId(name), TrajectoryId(trajectory), "tool", "search", demand, attempt=attempt)


# -- one API against brute force -----------------------------------------------------------------------


@dataclass
class KnownCalls:
    """Every call that ever started, and what follows from the definitions of the quota."""

    quota: ApiQuota
    calls: dict[ActionId, tuple[float, float | None, int]] = field(default_factory=dict)  # start, end, what counts

    def latest_arrival(self, start: float, end: float | None) -> float | None:
        """The last moment at which a call can reach the API; None: not known yet."""
        within = self.quota.begins_within_s
        known = [each for each in (end, None if within is None else start + within) if each is not None]
        return min(known, default=None)

    def free(self, at: float) -> int | None:
        limits = []
        for window in self.quota.windows:
            counted = 0
            for start, end, calls in self.calls.values():
                last = self.latest_arrival(start, end)
                counted += calls if last is None or last > at or last + window.seconds > at else 0
            limits.append(int(window.most) - counted)
        if self.quota.concurrency:
            running = sum(calls for _, end, calls in self.calls.values() if end is None)
            limits.append(self.quota.concurrency - running)
        return max(0, min(limits)) if limits else None


WINDOWS = st.lists(st.builds(QuotaWindow, st.integers(1, 5), st.sampled_from((0.5, 1.0, 2.5, 7.0))), max_size=3)
QUOTAS = st.builds(
    ApiQuota,
    st.just(SEARCH),
    concurrency=st.integers(0, 4),
    windows=WINDOWS.map(tuple),
    begins_within_s=st.sampled_from((None, 0.0, 0.25, 3.0)),
)
MOVES = st.lists(st.tuples(st.sampled_from((0.0, 0.1, 0.5, 1.0)), st.integers(0, 9), st.integers(1, 3)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(quota=QUOTAS, moves=MOVES)
def test_free_calls_are_those_of_the_definition(quota: ApiQuota, moves: list[tuple[float, int, int]]) -> None:
    api, known, at = Api(quota), KnownCalls(quota), 0.0
    for number, (pause, choice, calls) in enumerate(moves):
        at += pause
        free = api.free(at)
        assert free == known.free(at)
        running = [name for name, (_, end, _) in known.calls.items() if end is None]
        if running and choice < 5:
            name = running[choice % len(running)]
            start, _, count = known.calls[name]
            used = (None, 0, count - 1, count + 1)[number % 4]
            api.give_back(name, at, used=used)
            known.calls[name] = (start, at, count if used is None else used)
        elif free is None or free >= calls:
            name = ActionId(f"a{number}")
            api.take(name, calls, at)
            known.calls[name] = (at, None, calls)
        api.check_integrity()
        assert api.free(at) == known.free(at)


@settings(max_examples=200, deadline=None)
@given(quota=QUOTAS, moves=MOVES, wanted=st.integers(1, 3))
def test_the_next_time_is_the_first_at_which_so_many_calls_are_free(
    quota: ApiQuota, moves: list[tuple[float, int, int]], wanted: int
) -> None:
    api, at = Api(quota), 0.0
    for number, (pause, _, calls) in enumerate(moves):
        at += pause
        free = api.free(at)
        if free is None or free >= calls:
            api.take(ActionId(f"a{number}"), calls, at)
            if number % 3:
                api.give_back(ActionId(f"a{number}"), at)
    free, steps = api.free(at), 0
    while (next_s := api.next_s(at, wanted)) is not None:
        assert next_s > at
        before = (at + next_s) / 2
        assert (api.free(before) or 0) < wanted, "it could have started before"
        at, steps = next_s, steps + 1
        assert steps < 200
    free = api.free(at)
    most = quota.most_at_once
    if free is not None and free < wanted and (most is None or most >= wanted):
        assert api.running, "only the end of a call can free more"


# -- a world of calls ------------------------------------------------------------------------------------


@dataclass
class CallWorld:
    """A controller in virtual time; every call reaches its API at a random moment between its start and its end."""

    seed: int
    quotas: tuple[ApiQuota, ...]
    trajectories: int = 6
    calls_each: int = 6
    failing: float = 0.2
    controller: Controller = field(init=False)
    arrivals: dict[str, list[tuple[float, dict[QuotaUnit, float]]]] = field(default_factory=dict)
    journal: list[tuple[Any, Any]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.controller = Controller(build_strategies("sticky-least-loaded"))
        self.queue: list[tuple[float, int, Any]] = []
        self.count = 0
        self.at = 0.0
        self.requests: dict[str, ActionRequest] = {}
        self.under_way: dict[str, int] = {}
        self.most: dict[str, int] = {}

    def later(self, seconds: float, event: Any) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.at + seconds, self.count, event))

    def tell(self, event: Any) -> None:
        event = replace(event, at=self.at)
        commands = self.controller.handle(event)
        check_integrity(self.controller.state)
        self.journal.append((encode(event), [encode(each) for each in commands]))
        for command in commands:
            self.obey(command)

    def obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.WakeUp():
                self.later(max(0.0, command.at_s - self.at), ev.TimeReached(0.0))
            case cmd.RunAction():
                self.run(self.requests[command.action_id], command.host_id)
            case cmd.GiveUpAction():
                self.given_up.append(command.action_id)

    def run(self, request: ActionRequest, host: HostId) -> None:
        api = request.demand.names[0]
        run_s = self.random.choice((0.05, 0.3, 1.0, 2.0))
        arrival = self.at + self.random.random() * run_s
        tokens, cost = self.used(request)
        self.arrivals.setdefault(api, []).append((arrival, {"calls": 1, "tokens": tokens, "cost": cost}))
        self.under_way[api] = self.under_way.get(api, 0) + 1
        self.most[api] = max(self.most.get(api, 0), self.under_way[api])
        kind = self.random.random()
        cause, after = "", None
        if kind < self.failing:
            cause = self.random.choice((RATE_LIMITED, UNAVAILABLE))
            after = self.random.choice((None, None, 0.5, 3.0))
        said = (tokens, cost) if self.random.random() < 0.8 else (None, None)
        self.later(run_s, ev.ActionFinished(0.0, request.action_id, host, run_s, not cause, True, cause, after, *said))

    def used(self, request: ActionRequest) -> tuple[int, float]:
        """What a call really uses: no more than it was declared to."""
        tokens, micro = (request.demand.least[f"{request.demand.names[0]}#{unit}"] for unit in ("tokens", "cost"))
        return self.random.randint(0, tokens), self.random.randint(0, micro) / 1_000_000

    def play(self) -> None:
        self.tell(ev.PoolsDeclared(0.0, self.quotas))
        self.tell(ev.HostJoined(0.0, host_of("h", 4)))
        for number in range(self.trajectories):
            self.tell(ev.TrajectorySubmitted(0.0, trajectory_spec(f"t{number}")))
            for call in range(self.calls_each):
                api = self.random.choice(self.quotas).name
                metered = {"tokens": self.random.randint(0, 60), "cost": self.random.random() / 10}
                request = call_of(f"t{number}/{call}", f"t{number}", api=api, **metered)  # type: ignore[arg-type]
                self.requests[request.action_id] = request
                self.later(self.random.random() * 3, ev.ActionRequested(0.0, request))
        steps = 0
        while self.queue:
            at, _, event = heapq.heappop(self.queue)
            assert at >= self.at
            self.at, steps = at, steps + 1
            assert steps < 20_000, "it wakes up for ever"
            if isinstance(event, ev.ActionFinished):
                self.under_way[self.requests[event.action_id].demand.names[0]] -= 1
            self.tell(event)
            if isinstance(event, ev.ActionFinished):
                request = self.requests[event.action_id]
                if event.ok:
                    self.ended.append(event.action_id)
                else:
                    name = ActionId(f"{event.action_id}~")
                    again = replace(request, action_id=name, attempt=request.attempt + 1)
                    self.requests[name] = again
                    self.later(0.001, ev.ActionRequested(0.0, again))


def _most_in_a_window(arrivals: list[tuple[float, dict[QuotaUnit, float]]], window: QuotaWindow) -> float:
    """By the definition: the largest amount that arrives in a half-open period of that length."""
    starts = [at for at, _ in arrivals]
    return max(sum(n[window.unit] for at, n in arrivals if s <= at < s + window.seconds) for s in starts)


@pytest.mark.parametrize("seed", range(25))
def test_no_window_is_ever_exceeded_and_nothing_starves(seed: int) -> None:
    quotas = (
        ApiQuota(SEARCH, 3, (QuotaWindow(4, 2.0), QuotaWindow(10, 9.0)), backoff_s=0.2, open_s=2.0),
        ApiQuota("pages", 0, (QuotaWindow(2, 1.0),), backoff_s=0.2, open_s=2.0),
        ApiQuota("judge", 0, (QuotaWindow(100, 2.0, "tokens"), QuotaWindow(0.15, 3.0, "cost")), backoff_s=0.2),
        ApiQuota("soon", 0, (QuotaWindow(70, 2.0, "tokens"),), begins_within_s=2.0, backoff_s=0.2),
        ApiQuota("mail", 2, (), backoff_s=0.2, open_s=2.0),
    )
    world = CallWorld(seed, quotas)
    world.play()
    assert len(world.ended) == world.trajectories * world.calls_each and not world.given_up
    assert not world.controller.state.actions
    for quota in quotas:
        resource = api_resource(quota.name)
        for window in quota.windows:
            assert _most_in_a_window(world.arrivals[resource], window) <= window.most + 1e-9
        assert not quota.concurrency or world.most[resource] <= quota.concurrency
    fresh = Controller(build_strategies("sticky-least-loaded"))
    assert list(replay(fresh, world.journal)) == []


def test_a_quota_that_is_the_bottleneck_is_used_up() -> None:
    quota = ApiQuota(SEARCH, windows=(QuotaWindow(5, 2.0),), begins_within_s=0.0)
    world = CallWorld(3, (quota,), trajectories=10, calls_each=10, failing=0.0)
    world.play()
    # 5 calls for each 2 s: 100 calls need 19 periods after the first, and no more.
    starts = [replayed[0][1] for replayed in world.journal if any(c[0] == "RunAction" for c in replayed[1])]
    assert 38.0 <= max(starts) - min(starts) <= 38.0 + 3.0


# -- single stories ---------------------------------------------------------------------------------------


def _stage(*quotas: ApiQuota, trajectories: int = 1, **retries: int) -> Stage:
    stage = Stage(retries=RetryPolicy(**retries))
    stage.feed(ev.PoolsDeclared, quotas)
    stage.add_host("h")
    stage.submit(*(f"t{number}" if number else "t" for number in range(trajectories)))
    return stage


def _ask(stage: Stage, name: str, **more: Any) -> list[cmd.Command]:
    return stage.feed(ev.ActionRequested, call_of(name, **more))


def _ended(stage: Stage, name: str, cause: str = "", after: float | None = None) -> list[cmd.Command]:
    return stage.feed(ev.ActionFinished, ActionId(name), HostId("h"), 0.1, not cause, True, cause, after)


def _started(commands: list[cmd.Command]) -> list[str]:
    return [each.action_id for each in commands if isinstance(each, cmd.RunAction)]


def test_a_window_delays_the_next_call_and_asks_to_be_woken() -> None:
    stage = _stage(ApiQuota(SEARCH, windows=(QuotaWindow(1, 10.0),)))
    assert _started(_ask(stage, "a")) == ["a"]
    assert _ask(stage, "b") == []  # nobody knows when the call of a ends
    wake = _ended(stage, "a")
    assert wake == [cmd.WakeUp(stage.at + 10.0)]
    stage.at = wake[0].at_s - 2.0
    assert stage.feed(ev.TimeReached) == []
    (run,) = stage.feed(ev.TimeReached)
    assert isinstance(run, cmd.RunAction) and run.action_id == "b"
    assert run.waits.quota_s == pytest.approx(11.0)


def test_a_call_waits_for_its_tokens_and_what_it_did_not_use_is_free_at_its_end() -> None:
    stage = _stage(ApiQuota(SEARCH, windows=(QuotaWindow(1000, 60.0, "tokens"), QuotaWindow(2.0, 60.0, "cost"))))
    assert _started(_ask(stage, "a", tokens=800, cost=0.5)) == ["a"]
    assert _ask(stage, "b", tokens=800, cost=0.5) == []
    assert _started(_ask(stage, "c", api="pages", tokens=9000)) == ["c"], "it has no quota"
    ended = stage.feed(ev.ActionFinished, ActionId("a"), HostId("h"), 0.1, True, True, "", None, 150, 0.25)
    assert _started(ended) == ["b"]
    ended = stage.feed(ev.ActionFinished, ActionId("b"), HostId("h"), 0.1)
    assert _ask(stage, "d", tokens=100) == [cmd.WakeUp(stage.at - 2.0 + 60.0)], "950 count, until those of a are over"
    (given_up,) = (each for each in _ask(stage, "e", cost=2.5) if isinstance(each, cmd.GiveUpAction))
    assert given_up.cause == "it needs cost 2.5 of api search at once; its quota allows cost 2 of api search"


def test_a_repetition_waits_for_its_back_off_and_counts_again() -> None:
    stage = _stage(ApiQuota(SEARCH, windows=(QuotaWindow(2, 1000.0),), backoff_s=8.0))
    _ask(stage, "a")
    _ended(stage, "a", UNAVAILABLE)
    (wake,) = _ask(stage, "a~1", attempt=1)
    assert isinstance(wake, cmd.WakeUp) and 4.0 <= wake.at_s - stage.at <= 8.0
    assert list(stage.state.delayed_actions) == ["a~1"]
    stage.at = wake.at_s
    (run,) = stage.feed(ev.TimeReached)
    assert isinstance(run, cmd.RunAction) and run.waits.quota_s >= wake.at_s - stage.at - 1.0
    assert stage.controller.view.api_free(SEARCH) == 0, "the repetition used the second call"


def test_back_off_doubles_has_jitter_and_is_the_same_for_the_same_action() -> None:
    quota = ApiQuota(SEARCH, backoff_s=1.0, max_backoff_s=8.0)
    for attempt, most_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0), (500, 8.0)):
        drawn = {backoff_s(quota, ActionId(f"a{number}"), attempt) for number in range(50)}
        assert len(drawn) == 50 and min(drawn) >= most_s / 2 and max(drawn) <= most_s
        assert backoff_s(quota, ActionId("a1"), attempt) in drawn


def test_retry_after_pauses_the_whole_api_and_no_other() -> None:
    stage = _stage(ApiQuota(SEARCH), ApiQuota("pages"))
    _ask(stage, "a")
    _ended(stage, "a", RATE_LIMITED, 30.0)
    asked = stage.at
    assert stage.controller.view.api_free(SEARCH) == 0
    assert _ask(stage, "b") == [cmd.WakeUp(asked + 30.0)]
    assert _started(_ask(stage, "c", api="pages")) == ["c"]
    stage.at = asked + 29.0
    assert _started(stage.feed(ev.TimeReached)) == ["b"]


def test_the_breaker_opens_lets_one_probe_through_and_closes() -> None:
    quota = ApiQuota(SEARCH, failures_to_open=2, open_s=10.0, backoff_s=1.0)
    stage = _stage(quota)
    api = stage.state.apis.of(SEARCH)
    for name in ("a", "b", "c"):
        _ask(stage, name)
    assert _ended(stage, "a", UNAVAILABLE) == []
    (report,) = _ended(stage, "b", UNAVAILABLE)
    assert isinstance(report, cmd.ReportApi)
    assert (report.api, report.state, report.until_s) == (SEARCH, "open", stage.at + 10.0)
    assert "2 calls failed" in report.cause
    opened = stage.at
    assert _ended(stage, "c") == [], "an answer of a call from before does not close it"
    assert _ask(stage, "d") == [cmd.WakeUp(opened + 10.0)]
    assert _ask(stage, "e") == []
    stage.at = opened + 9.0
    assert _started(stage.feed(ev.TimeReached)) == ["d"], "one probe"
    assert api.breaker is BreakerState.HALF_OPEN
    report, *_ = _ended(stage, "d", UNAVAILABLE)
    assert isinstance(report, cmd.ReportApi) and report.until_s == stage.at + 20.0, "longer each time"
    stage.at = report.until_s - 1.0
    assert _started(stage.feed(ev.TimeReached)) == ["e"]
    report, *_ = _ended(stage, "e")
    assert report == cmd.ReportApi(SEARCH, "closed")
    assert api.breaker is BreakerState.CLOSED and api.failures == 0


def test_an_error_of_the_tool_says_nothing_about_its_api() -> None:
    stage = _stage(ApiQuota(SEARCH, failures_to_open=1))
    _ask(stage, "a")
    _ended(stage, "a", "raised")
    assert stage.state.apis.of(SEARCH).breaker is BreakerState.CLOSED
    _ask(stage, "b")
    _ended(stage, "b", "timeout")
    assert stage.state.apis.of(SEARCH).breaker is BreakerState.OPEN


def test_an_action_does_not_wait_for_ever_for_an_api_that_is_shut() -> None:
    stage = _stage(ApiQuota(SEARCH, failures_to_open=1, open_s=100.0), max_call_s=20)
    _ask(stage, "a")
    _ended(stage, "a", UNAVAILABLE)
    (wake,) = _ask(stage, "b")
    assert wake == cmd.WakeUp(stage.at + 20.0)
    stage.at = wake.at_s - 1.0
    (given_up,) = stage.feed(ev.TimeReached)
    assert isinstance(given_up, cmd.GiveUpAction)
    assert given_up.cause == "it waited 20 s for api search: its circuit breaker is open"


def test_more_calls_at_once_than_the_quota_ever_allows_are_given_up() -> None:
    stage = _stage(ApiQuota(SEARCH, 5, (QuotaWindow(3, 1.0),)))
    (given_up,) = _ask(stage, "a", calls=4)
    assert isinstance(given_up, cmd.GiveUpAction)
    assert given_up.cause == "it needs 4 calls of api search at once; its quota allows 3 calls of api search"


def test_calls_of_a_lost_host_count_and_their_repetition_is_granted_again() -> None:
    stage = _stage(ApiQuota(SEARCH, windows=(QuotaWindow(1, 10.0),)), max_pool_wait_s=0)
    _ask(stage, "a")
    (wake,) = stage.feed(ev.HostLost, HostId("h"))
    assert wake == cmd.WakeUp(stage.at + 10.0)
    stage.add_host("h")
    stage.at = wake.at_s
    assert _started(stage.feed(ev.TimeReached)) == ["a"]


def test_an_action_that_never_ran_has_made_no_call() -> None:
    stage = _stage(ApiQuota(SEARCH, windows=(QuotaWindow(1, 10.0),)), trajectories=2)
    _ask(stage, "a")
    stage.feed(ev.ActionFinished, ActionId("a"), HostId("h"), 0.0, False, False)
    assert _started(_ask(stage, "b")) == ["b"]


def test_waiting_and_delayed_calls_end_with_their_trajectory() -> None:
    stage = _stage(ApiQuota(SEARCH, 1), trajectories=2)
    _ask(stage, "a", trajectory="t1")
    _ask(stage, "b")
    _ask(stage, "c", attempt=1)
    stage.end("t")
    assert list(stage.state.actions) == ["a"] and not stage.state.delayed_actions
    assert not stage.state.apis.wanted


def test_a_call_that_waits_for_its_quota_holds_back_no_other_action() -> None:
    stage = _stage(ApiQuota(SEARCH, 1))
    _ask(stage, "a")
    assert _ask(stage, "b") == []
    assert _started(stage.act("c", "t")) == ["c"]


def test_a_quota_declared_again_keeps_what_is_known() -> None:
    quota = ApiQuota(SEARCH, windows=(QuotaWindow(2, 50.0),))
    stage = _stage(quota)
    _ask(stage, "a")
    _ended(stage, "a")
    stage.feed(ev.PoolsDeclared, (quota,))
    assert stage.controller.view.api_free(SEARCH) == 1
    stage.feed(ev.PoolsDeclared, (ApiQuota(SEARCH, windows=(QuotaWindow(4, 20.0),)),))
    assert stage.controller.view.api_free(SEARCH) == 3


def test_a_strategy_that_exceeds_a_quota_is_refused() -> None:
    class Greedy:
        def allocate(self, view: ClusterView) -> list[Grant]:
            need = Resources.of({api_resource(SEARCH): 1})
            return [Grant(action.spec.action_id, HostId("h"), need) for action in view.waiting_actions]

    strategies = replace(build_strategies("sticky-least-loaded"), actions=Greedy())
    stage = Stage(strategies=strategies)
    stage.feed(ev.PoolsDeclared, (ApiQuota(SEARCH, 1),))
    stage.add_host("h")
    stage.submit("t")
    _ask(stage, "a")
    with pytest.raises(GuardViolation, match="0 calls of api search are free, not 1 for action b"):
        _ask(stage, "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "the name of the API"),
        ({"name": SEARCH, "concurrency": -1}, "concurrency is -1"),
        ({"name": SEARCH, "windows": (QuotaWindow(0, 1.0),)}, "calls of a window is 0"),
        ({"name": SEARCH, "windows": (QuotaWindow(1, 0.0),)}, "seconds of a window is 0.0"),
        ({"name": SEARCH, "windows": ((20, 1.0),)}, "windows has"),
        ({"name": SEARCH, "windows": QuotaWindow(20, 1.0)}, "windows is"),
        ({"name": SEARCH, "begins_within_s": -1.0}, "begins_within_s is -1.0"),
        ({"name": SEARCH, "failures_to_open": 0}, "failures_to_open is 0"),
        ({"name": SEARCH, "open_s": float("nan")}, "open_s is nan"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ApiQuota(**given)
    assert ApiQuota(SEARCH, windows=[QuotaWindow(20, 1.0)]) == ApiQuota(SEARCH, windows=(QuotaWindow(20, 1.0),))  # type: ignore[arg-type]


def test_quotas_are_journalled() -> None:
    event = ev.PoolsDeclared(1.0, (ApiQuota(SEARCH, 2, (QuotaWindow(3, 4.0), QuotaWindow(5, 60.0))),))
    assert decode(encode(event)) == event


# -- the trajectory whose reward is computed ------------------------------------------------------------------


def test_a_trajectory_that_is_scored_holds_neither_engine_nor_place() -> None:
    stage = Stage(overrides=["admission=at-most,alive=1"])
    stage.join("e")
    stage.add_host("h")
    stage.submit("t", "next")
    stage.finish(stage.generating("t"))
    commands = stage.feed(ev.ProgramEnded, TrajectoryId("t"))
    assert cmd.AdmitTrajectory(TrajectoryId("next")) in commands
    assert any(isinstance(each, cmd.DropContext) for each in commands)
    assert not stage.engine("e").residents
    assert _started(stage.act("r", "t")) == ["r"], "its reward runs"
    stage.finish(stage.generating("next"))
    stage.feed(ev.ActionFinished, ActionId("r"), HostId("h"), 0.5)
    stage.feed(ev.TrajectoryEnded, TrajectoryId("t"), "completed")
    assert TrajectoryId("t") not in stage.state.trajectories


def test_what_its_program_left_running_is_aborted_once_and_not_started_again() -> None:
    stage = Stage()
    stage.add_host("h", 1)
    stage.submit("t")
    stage.act("left", "t")
    assert cmd.AbortAction(ActionId("left"), HostId("h")) in stage.feed(ev.ProgramEnded, TrajectoryId("t"))
    stage.act("reward", "t")
    lost = stage.feed(ev.HostLost, HostId("h"))
    assert lost == [] and list(stage.state.actions) == ["reward"]
    stage.late(ev.ProgramEnded, TrajectoryId("t"))
    assert stage.end("t") == []
    assert not stage.state.trajectories


def test_times_of_wake_ups_never_go_back() -> None:
    world = CallWorld(11, (ApiQuota(SEARCH, 1, (QuotaWindow(1, 3.0),), backoff_s=0.5),), 3, 3)
    world.play()
    times = [row[1] for row, _ in world.journal]
    assert all(first <= second for first, second in pairwise(times))
