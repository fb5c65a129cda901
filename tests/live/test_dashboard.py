"""The page of the dashboard in a real browser during a rollout: its figures are those of the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from playwright.async_api import Browser, Page
from worlds.browser import Seen, chromium, chromium_path, read_page
from worlds.live_agents import echo_tool
from worlds.live_world import control_lines, emulated, run, without_nannies
from worlds.path_proxy import path_proxy

from heddle_dask.core.journal_codec import decode
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.scheduler.dashboard.pages import PANELS
from heddle_dask.live.scheduler.dashboard.panels.actions import actions_view
from heddle_dask.live.scheduler.dashboard.panels.engines import engines_view
from heddle_dask.live.scheduler.dashboard.panels.lengths import lengths_view
from heddle_dask.strategies.presets import Strategy
from heddle_dask.views.history.history_pictures import picture_of
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_snapshot import RunSnapshot

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECRET = "the-prompt-that-no-page-shows"
TRAJECTORIES = 24
FAILING = 3


class BusyAgent:
    """Uneven trajectories with tools; some of the programs fail."""

    name = "busy-agent"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{i}", f"{SECRET} {i}. " * 4, known_tokens=40 * (2 + i % 5)) for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        number = int(task.task_id.removeprefix("t"))
        ctx.append("user", task.prompt)
        for step in range(2 + number % 5):
            await ctx.generate(max_tokens=40, temperature=0.0, ignore_eos=True)
            ctx.append("tool", await ctx.call(echo_tool, f"{number} {step}", 0.1))
            if number < FAILING:
                raise ValueError("a program of the user that fails\nand more")
        return 1.0


@dataclass
class Looked:
    """What was seen in one rollout.

    Attributes
    ----------
    before, readings
        The page before the rollout, and during and after it.
    behind_proxy, alone
        The page under another path, and each panel alone by its name.
    """

    before: dict[str, Any] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    behind_proxy: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, dict[str, Any]] = field(default_factory=dict)
    plots: dict[str, str] = field(default_factory=dict)
    page_text: str = ""
    seen: Seen = field(default_factory=Seen)
    lines: list[Any] = field(default_factory=list)
    screenshot: Path = Path()


@contextlib.asynccontextmanager
async def tab(browser: Browser, url: str, seen: Seen) -> AsyncIterator[Page]:
    page = await browser.new_page(viewport={"width": 1500, "height": 1000})
    seen.watch(page)
    await page.goto(url)
    await page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    yield page
    await page.close()


async def read_until_it_ends(page: Page, batch: asyncio.Task[Any], looked: Looked) -> None:
    """Read every offset that the page shows, up to the last one after the rollout."""
    while True:
        over = batch.done()
        found = await read_page(page)
        if not looked.readings or looked.readings[-1]["offsets"] != found["offsets"]:
            looked.readings.append(found)
        elif over and "(closed)" in found["texts"]["heddle-headline-heading"]:
            return
        await page.wait_for_timeout(100)


async def look(model: str, folder: Path) -> Looked:
    looked = Looked()
    spec = emulated(model, seconds_per_token=0.01, slots=2, kv_transfer=True)
    async with (
        LocalRolloutCluster(2, tool_cpus=4, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
        chromium() as browser,
    ):
        port = cluster.scheduler_info["services"]["dashboard"]
        base = f"http://127.0.0.1:{port}"
        async with tab(browser, f"{base}/heddle", looked.seen) as page:
            looked.before = await read_page(page)
            rollout = Rollout(
                client,
                env=BusyAgent(),
                model=model,
                engines=Engines(spec=spec, count=2),
                strategy=Strategy("heddle", ("predictor=oracle,error_factor=2", "admission=at-most,alive=12")),
                seed=3,
                out=folder / "run.zarr",
            )
            batch = asyncio.ensure_future(rollout.run(TRAJECTORIES))
            await read_until_it_ends(page, batch, looked)
            await batch
            looked.page_text = await page.content()
            looked.screenshot = folder / "dashboard.png"
            await page.screenshot(path=looked.screenshot, full_page=True)
            looked.plots = await page.evaluate("() => fetch('individual-plots.json').then((got) => got.json())")
        for panel in PANELS:
            async with tab(browser, f"{base}/individual-heddle-{panel.name}", looked.seen) as page:
                looked.alone[panel.name] = await read_page(page)
        async with (
            path_proxy(port, "/node/c12/8787") as url,
            tab(browser, f"{url}/heddle", looked.seen) as page,
        ):
            looked.behind_proxy = await read_page(page)
    looked.lines = control_lines(folder / "run.zarr")
    return looked


@pytest.fixture(scope="module")
def looked(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Looked:
    chromium_path()
    with without_nannies():
        found: Looked = run(look(model_dir, tmp_path_factory.mktemp("dashboard")), 200)
    return found


def replayed(lines: Sequence[Any], offset: int) -> RunSnapshot:
    """The picture that the journal gives, up to an offset."""
    history = RunHistory()
    for event, commands in lines[:offset]:
        history.take(decode(event), [decode(each) for each in commands])  # type: ignore[arg-type,misc]
    return picture_of(history, session="replayed", is_open=True, strategy="", now_s=history.at_s)


def figures_of(snapshot: RunSnapshot) -> dict[str, int]:
    """What the headline shows, counted from a picture."""
    here = [engine for engine in snapshot.engines if engine.state != "lost"]
    return {
        "submitted": snapshot.counts.submitted,
        "waiting": snapshot.counts.by_phase["admission"],
        "live": snapshot.counts.live,
        "ended": sum(snapshot.counts.ended.values()),
        "running": sum(min(engine.generating, engine.slots) for engine in here),
        "queued": sum(engine.queued for engine in here) + snapshot.counts.steps_waiting,
        "steps": snapshot.counts.steps,
        "tokens": snapshot.counts.generated_tokens,
    }


def columns(view: Any, source: str, *names: str) -> dict[str, list[Any]]:
    return {name: list(view.sources[source][name]) for name in names}


def shown(reading: dict[str, Any], source: str, *names: str) -> dict[str, list[Any]]:
    return {name: reading["sources"][source][name] for name in names}


def test_every_figure_is_that_of_the_journal_at_the_offset_that_the_page_shows(looked: Looked) -> None:
    offsets = [reading["offsets"]["headline"] for reading in looked.readings]
    during = [reading for reading in looked.readings if 0 < reading["figures"].get("ended", 0) < TRAJECTORIES]
    assert len(during) >= 2, offsets
    assert offsets[-1] == len(looked.lines)
    for reading in looked.readings:
        if not reading["figures"]:
            continue  # the session has not begun
        picture = replayed(looked.lines, reading["offsets"]["headline"])
        told = {name: reading["figures"][name] for name in figures_of(picture)}
        assert told == figures_of(picture)


def test_the_charts_draw_what_the_journal_tells(looked: Looked) -> None:
    during = [reading for reading in looked.readings[:-1] if reading["figures"].get("submitted")]
    assert len(during) >= 2
    for reading in during:
        picture = replayed(looked.lines, reading["offsets"]["headline"])
        names = ("engine", "slots", "generating", "queued")
        assert shown(reading, "heddle-engines-engines", *names) == columns(engines_view(picture), "engines", *names)
        names = ("pool", "cpus", "used", "waiting", "running")
        assert shown(reading, "heddle-actions-pools", *names) == columns(actions_view(picture), "pools", *names)
        names = ("predicted", "actual")
        assert shown(reading, "heddle-lengths-before", *names) == columns(lengths_view(picture), "before", *names)
        segments = reading["sources"]["heddle-timeline-segments"]
        listed = [*picture.longest, *picture.latest_ended]
        assert set(segments["trajectory"]) <= {each.trajectory_id for each in listed}
        assert len(segments["row"]) == len(segments["left"]) > 0


def test_failures_are_shown_with_their_cause(looked: Looked) -> None:
    last = looked.readings[-1]
    failed = {name: number for name, number in last["figures"].items() if name.startswith("trajectory: ")}
    assert sum(failed.values()) == FAILING
    assert f"{FAILING}" in last["texts"]["heddle-failures-heading"]
    assert "failed" in last["texts"]["heddle-failures-heading"]
    table = last["texts"]["heddle-failures-table"]
    assert "failed by agentValueError: a program of the user that fails" in table and "and more" not in table


def test_before_the_first_rollout_the_page_says_so(looked: Looked) -> None:
    assert "No session is open" in looked.before["texts"]["heddle-headline-heading"]
    assert looked.before["sources"]["heddle-timeline-segments"]["row"] == []


def test_the_page_makes_no_error_and_asks_no_other_host(looked: Looked) -> None:
    assert looked.seen.errors == []
    assert looked.seen.hosts == {"127.0.0.1"}


def test_the_page_shows_no_prompt(looked: Looked) -> None:
    everything = looked.page_text + repr(looked.readings) + repr(looked.alone)
    assert "t0" in everything
    assert SECRET not in everything


def test_jupyterlab_finds_every_panel_and_each_shows_the_same(looked: Looked) -> None:
    listed = set(looked.plots.values())
    assert {f"/individual-heddle-{panel.name}" for panel in PANELS} <= listed
    last = looked.readings[-1]
    for panel in PANELS:
        alone = looked.alone[panel.name]
        assert alone["offsets"] == {panel.name: last["offsets"][panel.name]}
        assert alone["texts"][f"heddle-{panel.name}-heading"].startswith(panel.title)


def test_behind_a_proxy_under_another_path_the_page_is_the_same(looked: Looked) -> None:
    # The rollout's engines leave with it, at some moment.
    shown, before = ({**each["figures"], "engines": 0} for each in (looked.behind_proxy, looked.readings[-1]))
    assert shown == before
    assert shown["ended"] == TRAJECTORIES


def test_a_screenshot_shows_something(looked: Looked) -> None:
    assert looked.screenshot.stat().st_size > 50_000
