"""The feed of groups across sessions: what an earlier one had begun is not begun again. No cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from worlds.training_builders import trained_record

from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.base import Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.mix import MixedSource
from heddle_dask.environments.task_sources import EnvironmentSource, ListSource, TaskSource
from heddle_dask.live.driver.files.run_files import RunFiles
from heddle_dask.live.driver.groups import group_feed
from heddle_dask.live.driver.groups.group_feed import GroupFeed, GroupPort
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.runs.endings import EnvironmentFailures
from heddle_dask.live.driver.runs.program_runs import EndedAttempt
from heddle_dask.records.trajectory_prefix import PREFIX
from heddle_dask.training.groups import GroupPlan
from heddle_dask.training.prefix_sampling import PrefixRule

ENVIRONMENT = FunctionEnvironment(None, name="e", tasks=lambda count, seed: [Task(f"t{n}", f"{n}") for n in range(9)])
PLAN = GroupPlan(members=4, max_running=8, prefixes=PrefixRule())


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_feed, "send", lambda client, message: None)


class Session:
    """A feed, connected to the files of a run."""

    def __init__(self, out: Path, mode: str, source: TaskSource | None = None, plan: GroupPlan = PLAN) -> None:
        self.files = RunFiles(Output(out, mode), lambda: {"environment": "e", "seed": 1})
        self.files.open()
        self.files.begin_batch()
        self.failures = EnvironmentFailures(RetryPolicy())
        driver = Mock(waiting=0, failures=self.failures)
        self.feed = GroupFeed(source or EnvironmentSource(ENVIRONMENT, 1), plan, 1)
        self.feed.connect(GroupPort(Mock(status="closed"), Mock(), driver), self.files, "", lambda: None)

    def end(self, attempts: Sequence[Attempt], rewards: Sequence[float], cause: str = "") -> None:
        for attempt, reward in zip(attempts, rewards, strict=True):
            record = trained_record(attempt.name, attempt.spec.group_id, None if cause else reward, (0, 0, 0))
            behind = 0 if attempt.prefix is None else attempt.prefix.steps
            record = replace(
                record,
                steps=tuple(replace(step, step_index=step.step_index + behind) for step in record.steps),
                task_id=attempt.task.task_id,
                environment="e",
                prompt_key=attempt.spec.prompt_key,
                seed=attempt.seed,
                status="aborted" if cause else "completed",
                cause=cause,
                metadata={} if attempt.prefix is None else {PREFIX: attempt.prefix.facts},
            )
            assert self.files.writer is not None
            self.files.writer.finish(record)
            self.feed.ended(EndedAttempt(attempt, record))

    def deliver(self) -> None:
        while self.feed.finished:
            self.feed.take()
            self.feed.confirm()


def groups_of(attempts: Sequence[Attempt]) -> list[str]:
    return list(dict.fromkeys(attempt.spec.group_id for attempt in attempts))


@pytest.mark.parametrize(("why", "following"), [("skewed", "g000000c1"), ("stale", "g000000.1")])
def test_what_follows_a_group_that_has_not_closed_is_begun_once(tmp_path: Path, why: str, following: str) -> None:
    async def body() -> None:
        first = Session(tmp_path / "run.zarr", "create")
        attempts = first.feed.pull()
        if why == "skewed":
            first.end(attempts, [1, 0, 0, 0])
            assert first.feed.take().group_id == "g000000", "its consumer works with it when the run stops"
        else:
            first.end(attempts[:1], [0], cause="stale")  # the others are cancelled, and have not ended when it stops
        assert groups_of(first.feed.pull()) == [following]
        await first.files.close()

        again = Session(tmp_path / "run.zarr", "resume")
        resumed = again.feed.pull()
        assert groups_of(resumed) == ([following] if why == "skewed" else ["g000000", following])
        *cancelled, _, _, _, _ = resumed
        again.end(cancelled, [0] * len(cancelled), cause="stale")
        again.end(resumed[-4:], [1, 1, 0, 0])
        again.deliver()
        assert groups_of(again.feed.pull()) == ["g000001"]
        await again.files.close()

    asyncio.run(body())


def test_a_task_is_quarantined_in_its_own_part_of_a_mix_and_when_its_run_goes_on(tmp_path: Path) -> None:
    parts = [FunctionEnvironment(None, name=name) for name in ("broken", "whole")]
    source = MixedSource([(ListSource([Task("t", "one")] * 9, part), 1.0) for part in parts], 1)
    drawn = {sourced.environment.name for n in range(4) if (sourced := source.task(n)) is not None}
    assert drawn == {"broken", "whole"}

    async def body() -> None:
        for mode in ("create", "resume"):
            session = Session(tmp_path / "run.zarr", mode, source)
            if mode == "create":
                session.failures.quarantine(("broken", "t"), "gone")
            attempts = [*session.feed.pull(), *session.feed.pull()]
            assert {attempt.environment.name for attempt in attempts} == {"whole"} and len(groups_of(attempts)) == 2
            session.end(attempts, [1, 0] * 4)
            session.deliver()
            await session.files.close()

    asyncio.run(body())


def test_a_group_behind_a_prefix_that_fails_in_a_session_without_prefix_sampling_begins_from_scratch(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        first = Session(tmp_path / "run.zarr", "create")
        first.end(first.feed.pull(), [1, 0, 0, 0])
        first.feed.take()
        assert groups_of(first.feed.pull()) == ["g000000c1"]
        await first.files.close()

        again = Session(tmp_path / "run.zarr", "resume", plan=replace(PLAN, prefixes=None))
        resumed = [attempt for attempt in again.feed.pull() if attempt.prefix is not None]
        assert groups_of(resumed) == ["g000000c1"]
        again.end(resumed, [0, 0, 0, 0], cause=PREFIX)
        again.feed.take()
        again.feed.confirm()
        anew = again.feed.pull()
        assert "g000000c1.1" in groups_of(anew) and all(attempt.prefix is None for attempt in anew)
        await again.files.close()

    asyncio.run(body())
