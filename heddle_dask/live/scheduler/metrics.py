"""Prometheus metrics ``heddle_…`` under the scheduler's ``/metrics``, beside Dask's own.

The labels are bounded: phases, statuses, kinds, pools, seats of living engines; never an id of a trajectory. The
figures are those of the snapshot that the page shows (`snapshot_feed`). They count from the start of the session;
Prometheus takes the next session for a restart.

Dask serves the registry of the process. Where several schedulers share one, the latest that is open is exported, as of
Dask's own metrics.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from heddle_dask.live.scheduler.snapshot_feed import SnapshotFeed
from heddle_dask.views.history.engine_history import LIVING
from heddle_dask.views.history.run_snapshot import RunSnapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MOST_ENGINES: Final = 64
"""Engines with metrics of their own, those with the lowest seats; sums are over all."""

# A cause in words of the code. Messages of exceptions and programs are counted under `OTHER`.
_CLASS: Final = re.compile(r"[a-z][a-z -]{0,39}")
OTHER: Final = "other"

_LOG = logging.getLogger(__name__)
_collector: Collector | None = None


def export(feed: SnapshotFeed) -> bool:
    """Have ``/metrics`` show this feed; False where prometheus-client is not installed."""
    global _collector
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError:
        return False
    if _collector is None:
        _collector = Collector()
        REGISTRY.register(_collector)
    _collector.feeds.append(feed)
    return True


def withdraw(feed: SnapshotFeed) -> None:
    """Have ``/metrics`` show this feed no longer; without effect if it does not."""
    global _collector
    if _collector is None or feed not in _collector.feeds:
        return
    _collector.feeds.remove(feed)
    if not _collector.feeds:
        from prometheus_client import REGISTRY

        REGISTRY.unregister(_collector)
        _collector = None


class Collector:
    """What prometheus-client asks at every scrape."""

    def __init__(self) -> None:
        self.feeds: list[SnapshotFeed] = []  # those of the open schedulers of this process, latest last

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not take a snapshot."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The metrics of this interval's snapshot; none after a defect, which must not hide those of Dask."""
        try:
            return list(_metrics(self.feeds[-1]))
        except Exception:
            _LOG.exception("the metrics of heddle are missing in this scrape")
            return ()


def _metrics(feed: SnapshotFeed) -> Iterator[Metric]:
    snapshot = feed.latest()
    yield from _of_session(snapshot)
    yield from _of_runs(snapshot)
    yield from _of_engines(snapshot)
    yield from _of_actions(snapshot)
    yield from _of_moves(snapshot)
    orders, open_orders = feed.agents()
    yield _counter("gateway_requests", "Requests of agents, those that were refused included.", orders)
    yield _gauge("gateway_requests_open", "Requests of agents that have no answer yet.", open_orders)
    yield _counter("snapshots", "Pictures taken for page, metrics and terminals.", feed.taken)
    yield _counter("snapshot_seconds", "Seconds of the event loop that they took.", feed.spent_s)


def _of_session(snapshot: RunSnapshot) -> Iterator[Metric]:
    counts = snapshot.counts
    yield _gauge("session_open", "Whether a session is open.", int(snapshot.is_open))
    yield _counter("events", "Events handled: lines of the session's journal.", snapshot.journal_offset)
    yield _gauge("last_event_seconds", "Time of the latest event, since the session began.", snapshot.at_s)
    yield _counter("trajectories_submitted", "Trajectories announced.", counts.submitted)
    yield _counters("trajectories_ended", "Trajectories ended.", "status", counts.ended)
    yield _gauges("trajectories", "Trajectories that have not ended.", "phase", counts.by_phase)
    yield _counters("phase_seconds", "Seconds of all trajectories in each phase.", "phase", counts.phase_seconds)
    yield _counter("steps", "LLM steps finished.", counts.steps)
    yield _gauge("steps_waiting", "LLM steps for which no engine was chosen yet.", counts.steps_waiting)
    yield _counter("generated_tokens", "Tokens generated.", counts.generated_tokens)
    yield _counter("prompt_tokens", "Tokens of the contexts that engines were sent.", counts.prompt_tokens)
    yield _counter("cached_tokens", "Those that were in the engine's prefix cache.", counts.cached_tokens)
    yield _counter("preemptions", "Steps stopped for more urgent ones.", counts.preemptions)
    yield _counter("requeues", "Steps that waited again: lost or draining engines, work stealing.", counts.requeues)
    yield from _of_rewards(snapshot)
    failures: Counter[tuple[str, str]] = Counter()
    for failure in snapshot.failures:
        cause = failure.cause if _CLASS.fullmatch(failure.cause) else OTHER
        failures[failure.boundary, cause] += failure.count
    family = _labelled_counter("failures", "Failures by boundary and class of cause.", "boundary", "cause")
    for labels, number in failures.items():
        family.add_metric(labels, number)
    yield family


def _of_rewards(snapshot: RunSnapshot) -> Iterator[Metric]:
    """By name of the run, with those that are open; of the only or latest one before its rewards are known: none."""
    rewards = {run.name or run.session: run.rewards for run in snapshot.runs} or {snapshot.name: snapshot.rewards}
    known = {name: each for name, each in rewards.items() if each.known}
    yield _counters("rewards", "Rewards that are known.", "run", {n: r.known for n, r in known.items()})
    for name, text, field in (
        ("reward_mean", "Mean of the known rewards.", "mean"),
        ("reward_spread", "Their standard deviation.", "spread"),
        ("reward_solved_share", "Share of the known rewards that are 1 or more.", "solved_share"),
        ("reward_flat_group_share", "Share of groups whose rewards are all equal.", "flat_share"),
    ):
        values = {n: value for n, r in known.items() if (value := getattr(r, field)) is not None}
        yield _gauges(name, text, "run", values)


def _of_runs(snapshot: RunSnapshot) -> Iterator[Metric]:
    """One label per open session: they are few, and each goes with its session."""
    runs = {run.session: run for run in snapshot.runs}
    yield _gauge("runs", "Sessions that share the cluster.", len(runs))
    yield _gauges("run_weight", "Weight of a session.", "run", {n: r.weight for n, r in runs.items()})
    yield _gauges("run_live", "Live trajectories of a session.", "run", {n: r.live for n, r in runs.items()})
    yield _gauges("run_steps_held", "Steps that wait for their turn.", "run", {n: r.held for n, r in runs.items()})
    yield _counters(
        "run_generated_tokens",
        "Tokens that a session has generated.",
        "run",
        {n: r.generated_tokens for n, r in runs.items()},
    )


def _of_engines(snapshot: RunSnapshot) -> Iterator[Metric]:
    states = Counter(engine.state for engine in snapshot.engines)
    yield _gauges("engines", "Engines.", "state", {s: states[s] for s in LIVING})
    living = sorted((e for e in snapshot.engines if e.state in LIVING), key=lambda engine: engine.seat)
    shown = {str(engine.seat): engine for engine in living[:MOST_ENGINES]}

    def each(name: str, text: str, field: str) -> Metric:
        return _gauges(name, text, "engine", {seat: getattr(e, field) for seat, e in shown.items()})

    yield each("engine_slots", "Slots of an engine.", "slots")
    yield each("engine_steps_generating", "Steps that an engine has.", "generating")
    yield each("engine_steps_queued", "Steps that wait at an engine's worker.", "queued")
    yield each("engine_resident_tokens", "Context tokens of trajectories at home there.", "resident_tokens")
    yield each("engine_kv_capacity_tokens", "KV memory; 0 when unknown.", "kv_capacity_tokens")


def _of_actions(snapshot: RunSnapshot) -> Iterator[Metric]:
    pools = {pool.pool: pool for pool in snapshot.pools}
    yield _gauges("pool_hosts", "Tool workers.", "pool", {n: p.hosts for n, p in pools.items()})
    yield _gauges("pool_cpus", "CPUs for actions.", "pool", {n: p.cpus for n, p in pools.items()})
    yield _gauges("pool_free_cpus", "CPUs that no action uses.", "pool", {n: p.free_cpus for n, p in pools.items()})
    yield _gauges("actions_running", "Actions that run.", "pool", {n: p.running for n, p in pools.items()})
    yield _gauges("actions_waiting", "Actions that wait.", "pool", {n: p.waiting for n, p in pools.items()})
    finished: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for action in snapshot.actions:
        finished[action.kind] += action.finished
        failed[action.kind] += action.failed
        seconds[action.kind] = seconds.get(action.kind, 0.0) + action.run_s
    yield _counters("actions", "Actions finished, failed ones included.", "kind", finished)
    yield _counters("actions_failed", "Actions failed.", "kind", failed)
    yield _counters("action_seconds", "Seconds of finished actions.", "kind", seconds)


def _of_moves(snapshot: RunSnapshot) -> Iterator[Metric]:
    moves = {move.kind: move for move in snapshot.moves}
    for name, text, field in (
        ("moves_started", "Moves of contexts started.", "started"),
        ("moves_from_leaving", "Those of them from an engine that drains or is lost.", "from_leaving"),
        ("moves_failed", "Moves failed.", "failed"),
        ("moved_tokens", "Tokens of moved contexts.", "tokens"),
        ("move_seconds", "Seconds of moves.", "seconds"),
        ("move_exposed_seconds", "Seconds in which steps waited for moves.", "exposed_s"),
    ):
        yield _counters(name, text, "kind", {kind: getattr(move, field) for kind, move in moves.items()})


def _gauge(name: str, text: str, value: float) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    return GaugeMetricFamily(f"heddle_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"heddle_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily

    return CounterMetricFamily(f"heddle_{name}", text, value=value)


def _labelled_counter(name: str, text: str, *labels: str) -> Any:
    from prometheus_client.metrics_core import CounterMetricFamily

    return CounterMetricFamily(f"heddle_{name}", text, labels=labels)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family: Metric = _labelled_counter(name, text, label)
    for key, value in values.items():
        family.add_metric([key], value)  # type: ignore[attr-defined]
    return family
