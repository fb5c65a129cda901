"""What a person sees of a live rollout, against its journal: the snapshot, and the metrics that Prometheus scrapes."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from worlds.live_agents import FaultyAgent
from worlds.live_world import cluster, control_lines, emulated, run

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import decode
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.cluster_messages import GetSnapshot
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import Strategy, strategies_of_run
from heddle_dask.views.history.history_pictures import picture_of
from heddle_dask.views.history.run_history import RunHistory

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECRET = "the prompt that no one but the model may read"
# Figures that change while no event does.
BY_THE_CLOCK = ("now_s", "taken_unix_s", "heddle_version")


class SecretAgent(FaultyAgent):
    """A faulty agent with a prompt that must not be shown."""

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("system", SECRET)
        return await super().solve(task, ctx)


async def scrape(url: str) -> dict[tuple[str, ...], float]:
    """Samples of our metrics by name and labels."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
    assert SECRET not in text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("heddle_")
    }


async def watched_rollout(spec: Any, out: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Snapshots and metrics seen during a rollout, and both of after it."""
    snapshots: list[Any] = []
    metrics: list[Any] = []
    async with cluster(2, nannies=False) as (_, client):
        port = client.scheduler_info()["services"]["dashboard"]
        url = f"http://127.0.0.1:{port}/metrics"
        before = (await ask_scheduler(client, GetSnapshot())).snapshot
        assert (before["session"], before["is_open"], before["journal_offset"]) == ("", False, 0)
        assert [pool["cpus"] for pool in before["pools"]] == [8]

        async def watch() -> None:
            while True:
                snapshots.append((await ask_scheduler(client, GetSnapshot())).snapshot)
                metrics.append(await scrape(url))
                await asyncio.sleep(0.15)

        rollout = Rollout(
            client,
            env=SecretAgent(),
            model=spec.model,
            engines=Engines(spec=spec, count=2),
            strategy=Strategy("heddle", ("predictor=oracle",)),
            out=out,
        )
        watching = asyncio.create_task(watch())
        async with rollout:
            records = list(await rollout.run(60))
        watching.cancel()
        await asyncio.sleep(1.1)  # else it is the picture of an interval in which the session was open
        after = (await ask_scheduler(client, GetSnapshot())).snapshot
        snapshots.append(after)
        metrics.append(await scrape(url))
        assert not after["is_open"]
    return records, snapshots, metrics


def test_figures_of_a_live_rollout_are_those_of_its_journal(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    spec = emulated(model_dir, seconds_per_token=0.02, slots=4)
    records, snapshots, metrics = run(watched_rollout(spec, out))
    lines = control_lines(out)
    facts = RunReader(out).metadata
    offsets = {snapshot["journal_offset"] for snapshot in snapshots}
    assert len(offsets) > 3 and max(offsets) == len(lines)
    history, controller = RunHistory(), Controller(strategies_of_run(facts))
    pictures: dict[int, Any] = {}
    engines: dict[int, Any] = {}
    scraped = {int(sample["heddle_events_total",]) for sample in metrics}
    for offset in range(len(lines) + 1):
        if offset in offsets | scraped:
            picture = picture_of(history, session="", is_open=True, strategy="", now_s=0.0)
            pictures[offset], engines[offset] = picture.as_json(), controller.snapshot().engines
        if offset < len(lines):
            event, commands = lines[offset]
            history.take(decode(event), [decode(each) for each in commands])  # type: ignore[arg-type,misc]
            controller.handle(decode(event))  # type: ignore[arg-type]
    for snapshot in snapshots:
        _same(snapshot, pictures[snapshot["journal_offset"]])
        if snapshot["is_open"]:
            told = [(e["generating"], e["queued"], e["resident_tokens"]) for e in snapshot["engines"]]
            seen = engines[snapshot["journal_offset"]]
            assert told == [(e.generating, e.queued, e.resident_tokens) for e in seen]
    for sample in metrics:
        _metrics_are_those_of(sample, pictures[int(sample["heddle_events_total",])])
    _causes_are_told(records, snapshots[-1])
    assert SECRET not in str(snapshots)


def _same(snapshot: Any, picture: Any) -> None:
    """All figures but those by the clock, and of causes, which are not in the controller's journal."""
    assert snapshot["counts"] == picture["counts"]
    assert _plain(snapshot["series"]) == picture["series"]
    assert _plain(snapshot["actions"]) == picture["actions"]
    assert _plain(snapshot["lengths"]) == picture["lengths"]
    for field in ("longest", "latest_ended"):
        told = [{**t, "cause": ""} for t in _plain(snapshot[field])]
        assert told == picture[field]
    others = [f for f in _plain(snapshot["failures"]) if f["boundary"] != "trajectory"]
    assert others == [f for f in picture["failures"] if f["boundary"] != "trajectory"]
    if snapshot["is_open"]:
        assert _plain(snapshot["engines"]) == picture["engines"]
        assert _plain(snapshot["pools"]) == picture["pools"]


def _plain(value: Any) -> Any:
    """With lists for the tuples that Dask makes of them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _metrics_are_those_of(sample: dict[tuple[str, ...], float], picture: Any) -> None:
    counts = picture["counts"]
    assert sample["heddle_steps_total",] == counts["steps"]
    assert sample["heddle_generated_tokens_total",] == counts["generated_tokens"]
    assert sample["heddle_trajectories_submitted_total",] == counts["submitted"]
    assert sample["heddle_steps_waiting",] == counts["steps_waiting"]
    for phase, number in counts["by_phase"].items():
        assert sample["heddle_trajectories", phase] == number
    for status, number in counts["ended"].items():
        assert sample["heddle_trajectories_ended_total", status] == number
    finished: Counter[str] = Counter()
    for action in picture["actions"]:
        finished[action["kind"]] += action["finished"]
    assert all(sample["heddle_actions_total", kind] == number for kind, number in finished.items())
    if sample["heddle_session_open",]:
        for engine in picture["engines"]:
            seat = str(engine["seat"])
            assert sample["heddle_engine_steps_generating", seat] == engine["generating"]
            assert sample["heddle_engine_resident_tokens", seat] == engine["resident_tokens"]


def _causes_are_told(records: list[Any], last: Any) -> None:
    """Failures by cause, against the records."""
    causes = Counter(f"{r.status} by {r.cause}" for r in records if r.status != "completed")
    assert len(causes) > 1
    shown = {f["cause"]: f["count"] for f in last["failures"] if f["boundary"] == "trajectory"}
    assert shown == causes
    assert dict(last["counts"]["ended"]) == Counter(record.status for record in records)
